"""Measurements of this machine, beside the floor they should be compared with."""
