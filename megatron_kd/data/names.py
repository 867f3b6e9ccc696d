"""The words a recipe may use for data."""

from typing import Literal

CorpusFormat = Literal["pydoc_topics", "text", "jsonl", "chat"]
Packing = Literal["concatenate", "documents", "padded"]
Truncation = Literal["split", "truncate", "drop"]
WITHIN_DOCUMENTS = ("documents", "padded")
"""Packings in which a token sees its own document alone, as if that began at position 0."""
