"""Sweeps: what their points read is made once, then they run one after another, and one table shows them all."""
