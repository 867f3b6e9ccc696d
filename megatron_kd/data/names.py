"""The words a recipe may use for data."""

from typing import Literal

CorpusFormat = Literal["pydoc_topics", "text", "jsonl"]
Packing = Literal["concatenate"]
