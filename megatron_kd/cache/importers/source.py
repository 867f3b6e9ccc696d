"""What every importer offers: rows of another system's cache by sample id, as that system stored them.

Legend: L positions of a sample, P positions that the source scored (L or L − 1), K' slots, K the most of any row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True, eq=False)
class SourceRow:
    """One row as it was found.

    Attributes:
        where: file and place, for messages.
        ids: integers [P, K'], anything in unused slots.
        logprobs: float16, float32 or float64 [P, K'], natural logarithms, −1000 or less in unused slots. Position n is
            the distribution of the token after position n.
    """

    where: str
    ids: np.ndarray
    logprobs: np.ndarray


class Source(Protocol):
    """A cache of another system, opened: everything that needs no row to be decoded is checked by then.

    Attributes:
        engine: the system that wrote it.
        top_k: K.
        value_dtype: the type of our cache that holds its log-probabilities without loss.
        lossy: whether it approximated them, so that they may add up to a little more than 1.
        proven: whether a row was found by its tokens. Otherwise it was found by its place in the order.
        surplus_rows: rows that belong to no sample.
        identity: JSON values that tell this source from others; they become part of the cache's identity.
    """

    engine: str
    top_k: int
    value_dtype: str
    lossy: bool
    proven: bool
    surplus_rows: int
    identity: Mapping[str, Any]

    def read(self, sample: int) -> SourceRow:
        """The row of a sample. Cheap in the order of the ids. Raises CacheError naming the file that is damaged."""
        ...


class Samples(Protocol):
    """What is asked of the set of samples that the rows shall belong to; ``data.samples.SampleSet`` is one."""

    path: Path
    seq_length: int
    manifest: dict[str, Any]

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer_identity(self) -> dict[str, Any]: ...

    def __len__(self) -> int: ...

    def tokens(self, sample: int) -> np.ndarray: ...

    def loss_mask(self, sample: int) -> np.ndarray: ...

    def document_offsets(self, sample: int) -> np.ndarray: ...

    def token_counts(self, split: str | None = None, vocab_size: int | None = None) -> np.ndarray: ...
