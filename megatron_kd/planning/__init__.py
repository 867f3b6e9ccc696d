"""Memory, time and storage of a recipe before it runs, by arithmetic. Imports no torch."""
