"""How tokenised documents become rows: the packing of a recipe in one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_kd.data.document_packing import Document, pack_documents, pad_documents
from megatron_kd.data.names import Packing, Truncation
from megatron_kd.data.packing import PackedRow, concatenate


@dataclass(frozen=True)
class PackingRule:
    """A packing and all that decides what it makes of documents.

    A tokenised document is int32 [n]; a token that is read but not learned (the prompt of a conversation) stands there
    as its complement, ``~id``, which is negative.

    Attributes:
        eos_id: put behind each document where ``adds_eos``; padding is made of it too.
        adds_eos: False for conversations, which end as their template ends them.
    """

    packing: Packing
    seq_length: int
    truncation: Truncation
    eos_id: int
    adds_eos: bool = True

    def taken(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions of rows that documents of these lengths take, int64; with ``documents`` before the padding."""
        whole = lengths + ((lengths > 0) & self.adds_eos)
        if self.packing == "concatenate":
            return whole
        if self.truncation == "truncate":
            whole = np.minimum(whole, self.seq_length)
        elif self.truncation == "drop":
            whole = np.where(whole > self.seq_length, 0, whole)
        return whole if self.packing == "documents" else -(-whole // self.seq_length) * self.seq_length

    def rows(self, documents: Iterable[NDArray[np.int32]]) -> Iterator[PackedRow]:
        """The rows of documents in their order."""
        if self.packing == "concatenate":
            return concatenate(documents, self.seq_length, self.eos_id)
        pack = pack_documents if self.packing == "documents" else pad_documents
        return pack(map(self._document, documents), self.seq_length, self.eos_id, self.truncation)

    def _document(self, coded: NDArray[np.int32]) -> Document:
        if self.adds_eos and len(coded):
            coded = np.append(coded, np.int32(self.eos_id))
        learned = coded >= 0
        return Document(np.where(learned, coded, ~coded).astype(np.int32), learned)
