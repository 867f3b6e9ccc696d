"""Targets as Megatron-LM keeps them for offline distillation, written and decoded by its own code.

The saver ships in Megatron-Core's wheel (``megatron.training.distillation``): zstd over ``torch.save`` of log-probs in
float16, the lower 16 bits of the ids and a boolean for the 17th, one member of a tar for each iteration.
"""

from __future__ import annotations

import argparse
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_kd.bench.cache_formats import Piece, Stored, Targets
from megatron_kd.bench.peers import PeerUnavailableError
from megatron_kd.cache.row import Row

MAX_VOCAB_SIZE = 2**17
_DISTILLATION = "megatron.training.distillation"


def check_megatron_lm(vocab_size: int) -> None:
    """Raises PeerUnavailableError where Megatron-LM's code cannot be used, or cannot hold the vocabulary."""
    if vocab_size > MAX_VOCAB_SIZE:
        raise PeerUnavailableError(
            f"its ids have 17 bits, a vocabulary of {vocab_size:,} does not fit in {MAX_VOCAB_SIZE:,}"
        )
    try:
        saver, utilities, _ = _modules()
        needed = [saver.LogitsSaverHooks._buffer_iteration, saver.LogitsSaverHooks._write_batched_tar]
        needed += [utilities.pack_indices, utilities.decode_logprobs_payload, utilities.iter_logprobs_tar_entries]
    except Exception as error:  # of whatever kind: a broken peer must not keep us from measuring the others
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise PeerUnavailableError(f"its saver cannot be used ({reason})") from error
    if not saver.HAVE_ZSTANDARD:
        raise PeerUnavailableError("its saver needs zstandard: pip install zstandard")


def _modules() -> tuple[Any, Any, Any]:
    from megatron.training import global_vars
    from megatron.training.distillation import logits_saver, utils_logits

    return logits_saver, utils_logits, global_vars


@contextmanager
def _run_arguments() -> Iterator[argparse.Namespace]:
    """Megatron-LM's global arguments, of which the saver asks for the number of the iteration."""
    _, _, global_vars = _modules()
    before = global_vars._GLOBAL_ARGS
    global_vars._GLOBAL_ARGS = argparse.Namespace(curr_iteration=0)
    try:
        yield global_vars._GLOBAL_ARGS
    finally:
        global_vars._GLOBAL_ARGS = before


@dataclass(frozen=True)
class MegatronLM:
    """One tar of the first layout, context parallel 1, an iteration of one row each: the best case for single rows."""

    name: str = "megatron_lm"
    values_dtype: str = "float16"
    remark: str = (
        "it keeps no tokens, masks or tails and verifies no checksum; single rows are found by an index of the tar "
        "that Megatron-LM itself does not have, decoded by its own decoder, and cut for a slice"
    )

    def write(self, folder: Path, rows: Sequence[Row]) -> None:
        """What the saver does once it has the top K: pack ids, ``torch.save``, zstd, tar. It does not sync."""
        logits_saver, utilities, _ = _modules()
        saver = logits_saver.LogitsSaverHooks.__new__(logits_saver.LogitsSaverHooks)
        saver._pending_writes = {}
        with _run_arguments() as arguments:
            for i, row in enumerate(rows):
                arguments.curr_iteration = i
                ids = torch.from_numpy(row.ids)[:, None]
                values = torch.from_numpy(row.logprobs.astype("f2", copy=False))[:, None]
                # The saver's own answer for slots that are not used: it has no other than these two sentinels.
                if (row.ids < 0).any():
                    values = values.where(ids >= 0, logits_saver.CACHED_LOGITS_LOGPROB_SENTINEL)
                low, high = utilities.pack_indices(ids)
                saver._buffer_iteration([values], [low], [high])
        top_k = rows[0].ids.shape[1]
        meta = {
            "hash": "0" * 32,
            "identifiers": {"seed": 0, "sequence_length": len(rows[0]), "train_samples": len(rows), "blend": None},
            "saver": {"k": top_k, "p": None, "min_k": 1, "save_dtype": "fp16"},
        }
        path = folder / utilities.batched_tar_filename(0, 0, len(rows) - 1)
        saver._write_batched_tar(str(path), saver._pending_writes, json.dumps(meta, separators=(",", ":")).encode())

    def open(self, folder: Path) -> Stored:
        """Lists the members of the tar."""
        (path,) = folder.glob("*.tar")
        return _TarRows(path)

    def part_of(self, file: Path) -> str:
        """All is in one tar."""
        return "file"


class _TarRows:
    def __init__(self, path: Path) -> None:
        _, self._utilities, _ = _modules()
        self._path = path
        self._file = path.open("rb")
        with tarfile.open(path) as tar:
            suffix = self._utilities.LOGPROBS_TAR_MEMBER_SUFFIX
            members = [member for member in tar if member.name.endswith(suffix)]
        members.sort(key=lambda member: int(member.name.split(".")[0]))
        self._extents = [(member.offset_data, member.size) for member in members]

    def read(self, row: int) -> Targets:
        offset, size = self._extents[row]
        self._file.seek(offset)
        return self._decoded(self._file.read(size))

    def read_pieces(self, row: int, pieces: Sequence[Piece]) -> list[Targets]:
        whole = self.read(row)
        return [whole.cut(start, stop) for start, stop in pieces]

    def read_in_order(self) -> Iterator[Targets]:
        for entry in self._utilities.iter_logprobs_tar_entries(str(self._path)):
            yield self._decoded(entry.data)

    def _decoded(self, data: bytes) -> Targets:
        (values,), (ids,) = self._utilities.decode_logprobs_payload(data)
        return Targets(ids.numpy()[:, 0], values.numpy()[:, 0])
