"""A few positions of cached rows in words: the text so far, the token that follows, what the teacher expected.

Legend: L positions of a row, K slots per position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_kd.cache.reader import CacheReader
from megatron_kd.cache.row import Row
from megatron_kd.cache.text import printable
from megatron_kd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_kd.errors import CacheError, DataError

CONTEXT = 16
"""Tokens before a position that are shown."""


@dataclass(frozen=True)
class Token:
    """An id, its text where the tokenizer is known, its probability where the teacher gave one."""

    id: int
    text: str | None = None
    probability: float | None = None

    def __str__(self) -> str:
        if self.text is None:
            shown = str(self.id)
        else:
            shown = '"' + printable(self.text).replace('"', '\\"') + '"'
            if "\N{REPLACEMENT CHARACTER}" in self.text:  # part of a character has no text of its own
                shown += f" ({self.id})"
        return shown if self.probability is None else f"{shown} {self.probability:.3f}"


@dataclass(frozen=True)
class DecodedPosition:
    """One position of a row.

    Attributes:
        position: its number in the row.
        context: the last tokens of its document, itself included, as text; ids where the tokenizer is not known.
        next_token: the token that follows, with the teacher's probability if it is among the K; None at a document's
            end, where nothing follows.
        candidates: the teacher's likeliest tokens, at the first temperature of the cache.
        tail: probability outside the K.
    """

    position: int
    context: str
    next_token: Token | None
    candidates: tuple[Token, ...]
    tail: float


@dataclass(frozen=True)
class DecodedRow:
    """Some positions of a row, or why it cannot be read."""

    sample_id: int
    length: int = 0
    documents: int = 0
    top_k: int = 0
    positions: list[DecodedPosition] = field(default_factory=list)
    problem: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)

    def text(self) -> str:
        """A few lines without any control character that the text may hold."""
        if self.problem:
            return printable(self.problem)
        documents = "1 document" if self.documents == 1 else f"{self.documents} documents"
        lines = [f"sample {self.sample_id}: {self.length:,} tokens, {documents}"]
        for at in self.positions:
            follows = "end of its document" if at.next_token is None else f"→ {at.next_token}"
            if at.next_token is not None and at.next_token.probability is None:
                follows += f" (not in the top {self.top_k})"
            candidates = ", ".join(map(str, at.candidates))
            lines += [
                f"  position {at.position}: …{printable(at.context)} {follows}",
                f"    {candidates}; outside the top {self.top_k} {at.tail:.3f}",
            ]
        return "\n".join(lines)


def find_tokenizer(
    identity: Mapping[str, Any], cache: Path | str, given: Path | None = None
) -> tuple[Tokenizer | None, str]:
    """The tokenizer that a cache's ids are of.

    Args:
        identity: ``tokenizer`` of the cache's manifest.
        cache: where the cache is: a tokenizer of the recorded name is looked for here and beside it.
        given: a Hugging Face folder or GGUF file to take instead.

    Returns:
        The tokenizer, or None with a line that says why ids cannot be spelled out. One that gives another meaning to
        any id is never taken.

    Raises:
        DataError: ``given`` holds no tokenizer.
    """
    name = identity.get("name")
    if given is None:
        # A name is a file's or a folder's; one that leads elsewhere was not written by us.
        plain = Path(name) if isinstance(name, str) and name else None
        if plain is None or plain.is_absolute() or ".." in plain.parts:
            return None, f"ids are not spelled out: the cache names no tokenizer ({name!r}), give it with --tokenizer"
        places = [place for place in (plain, Path(cache).parent / plain) if place.exists()]
        if not places:
            return None, f"ids are not spelled out: no tokenizer {name!r} here, give it with --tokenizer"
        found = places[0]
    else:
        found = given
    try:
        tokenizer = load_tokenizer(found)
    except DataError as error:
        if given is not None:
            raise
        return None, f"ids are not spelled out: {error}; give the tokenizer with --tokenizer"
    if tokenizer.identity()["sha256"] != identity.get("sha256"):
        return None, f"ids are not spelled out: {found} is another tokenizer than the cache's {name!r}"
    return tokenizer, ""


def decode_rows(
    path: Path | str,
    sample_ids: Sequence[int],
    tokenizer: Tokenizer | None,
    *,
    positions: int = 4,
    candidates: int = 5,
) -> list[DecodedRow]:
    """Some positions of some rows, spread over those that count in the loss. A row that is damaged says so.

    Args:
        tokenizer: None leaves ids as they are.
        positions: at most, of a row.
        candidates: at most, of a position.

    Raises:
        CacheError: where there is no cache.
    """
    reader = CacheReader(path)
    rows = []
    for sample in sample_ids:
        try:
            row = reader.read(sample)
        except CacheError as error:
            rows.append(DecodedRow(sample, problem=str(error)))
            continue
        counting = np.flatnonzero(row.loss_mask) if row.loss_mask.any() else np.arange(len(row))
        # The middles of as many equal parts: the first positions of a row have little context.
        middles = (np.arange(positions) + 0.5) / max(positions, 1) * len(counting)
        chosen = counting[np.unique(middles.astype(int))]
        decoded = [_position(row, int(position), tokenizer, candidates) for position in chosen]
        rows.append(DecodedRow(sample, len(row), len(row.document_offsets), row.ids.shape[1], decoded))
    return rows


def _position(row: Row, position: int, tokenizer: Tokenizer | None, candidates: int) -> DecodedPosition:
    starts = row.document_offsets
    document = int(starts[np.searchsorted(starts, position, "right") - 1])
    context = row.tokens[max(document, position - CONTEXT + 1) : position + 1]
    used = row.ids[position] >= 0
    ids = row.ids[position][used]
    probabilities = np.exp(row.logprobs[position][used].astype("<f8"))

    def token(id_: int, probability: float | None) -> Token:
        return Token(id_, None if tokenizer is None else tokenizer.decode([id_]), probability)

    follows = None
    if position + 1 < len(row) and position + 1 not in starts:
        true = int(row.tokens[position + 1])
        among = np.flatnonzero(ids == true)
        follows = token(true, float(probabilities[among[0]]) if len(among) else None)
    return DecodedPosition(
        position=position,
        context=" ".join(map(str, context)) if tokenizer is None else tokenizer.decode(context),
        next_token=follows,
        candidates=tuple(
            token(int(i), float(p)) for i, p in zip(ids[:candidates], probabilities[:candidates], strict=True)
        ),
        tail=float(np.exp(row.tail_logmass[position].astype("<f8"))),
    )
