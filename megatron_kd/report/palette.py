"""How runs are told apart in every picture."""

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
"""Okabe and Ito's palette, told apart with every common colour vision; dashes and markers repeat the distinction."""
