"""Which text is used, and how it becomes rows of tokens."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from megatron_kd.config.base import PathString, Section


class CorpusConfig(Section):
    """The text that ``prepare`` reads."""

    format: Literal["pydoc_topics", "text", "jsonl", "chat"]
    """pydoc_topics: the language reference that every Python carries; text: a document a file; jsonl: one a line;
    chat: a conversation a line, under messages, of which the assistant's tokens train."""
    paths: list[PathString] = Field(default_factory=list)
    """Files or folders of the corpus; none for pydoc_topics."""
    text_key: Annotated[str, Field(min_length=1)] = "text"
    """Key of the text in each line of jsonl."""

    @model_validator(mode="after")
    def _check_paths(self) -> Self:
        if self.format == "pydoc_topics" and self.paths:
            raise ValueError(f"format pydoc_topics reads no files, but paths names {len(self.paths)}: remove paths")
        if self.format != "pydoc_topics" and not self.paths:
            raise ValueError(f"format {self.format} needs files: set paths to a list of them")
        return self


class DataConfig(Section):
    """Samples: rows of seq_length tokens."""

    samples: PathString
    """Folder of the prepared samples; ``prepare`` writes it, ``capture`` and ``train`` read it."""
    seq_length: Annotated[int, Field(ge=2)]
    """Tokens in a row."""
    packing: Literal["concatenate", "documents", "padded"] = "concatenate"
    """concatenate: documents run on, joined by the end-of-text token, and see those before them; documents: whole
    documents are fitted into rows and see themselves alone; padded: the same with one document a row."""
    truncation: Literal["split", "truncate", "drop"] = "split"
    """Of a document longer than a row, with documents and padded: cut it into documents, keep its first tokens, or
    leave it out."""
    corpus: CorpusConfig | None = None
    """What ``prepare`` reads; not needed where the samples exist."""
    tokenizer: PathString | None = None
    """Hugging Face folder or GGUF file; null: the tokenizer of the teacher's source (teacher.model.hf)."""
    train_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the training split, rounded down to whole rows; ``train`` takes the first rows where the samples have
    more. null: all that held-out leaves."""
    heldout_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens of the held-out split, rounded down to whole rows; null: no held-out split."""
    shuffle: bool = True
    """Draw the rows of an epoch in a random order given by the seed."""
    prefetch_batches: Annotated[int, Field(ge=1, le=1024)] = 2
    """Global batches that each rank holds its part of, read ahead of the step that trains."""
    num_workers: Annotated[int, Field(ge=1, le=64)] = 4
    """Threads of each rank that read ahead, and so reads in flight: more where storage answers slowly."""

    @model_validator(mode="after")
    def _check_packing(self) -> Self:
        if self.packing == "concatenate" and self.truncation != "split":
            raise ValueError(
                f"truncation is {self.truncation!r}, but packing concatenate goes on in the next row: set packing to "
                "documents or padded, or truncation to split"
            )
        if self.packing == "concatenate" and self.corpus is not None and self.corpus.format == "chat":
            raise ValueError(
                "corpus.format is 'chat', but with packing 'concatenate' conversations would see each other: set "
                "packing to documents or padded"
            )
        return self

    @model_validator(mode="after")
    def _check_splits(self) -> Self:
        for key in ("train_tokens", "heldout_tokens"):
            tokens = getattr(self, key)
            if tokens is not None and tokens < self.seq_length:
                raise ValueError(
                    f"{key} {tokens} is less than one row: raise it to at least seq_length {self.seq_length}"
                )
        return self
