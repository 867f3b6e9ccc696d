"""Whether this environment can do what a recipe asks: what is installed, what is reachable, what it computes."""
