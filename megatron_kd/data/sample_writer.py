"""Writing a set of samples: streamed, published whole, reused where the same one stands already. L row length."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megatron_kd.data.names import WITHIN_DOCUMENTS
from megatron_kd.data.npy import NpyWriter
from megatron_kd.data.packing import PackedRow
from megatron_kd.data.samples import FORMAT_VERSION, MANIFEST, SampleSet, add_to_digest
from megatron_kd.errors import DataError
from megatron_kd.files import fsync_directory, write_json

_ROWS_PER_WRITE = 256


def sample_request(
    *,
    seq_length: int,
    packing: str,
    tokenizer_identity: Mapping[str, Any],
    corpus_identity: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> dict[str, Any]:
    """All that decides the rows of a set of samples. Equal requests give equal samples.

    Args:
        selection: how documents were chosen and shared out among the splits (budgets, seed).
    """
    tokenizer = {key: value for key, value in tokenizer_identity.items() if key != "name"}
    return {
        "seq_length": seq_length,
        "packing": packing,
        "tokenizer": tokenizer,
        "corpus": dict(corpus_identity),
        "selection": dict(selection),
    }


def find_samples(path: str | Path, request: Mapping[str, Any]) -> SampleSet | None:
    """The complete samples at ``path`` if they were made from this very request, None where nothing is.

    Raises DataError, naming the differences, where other samples are there, or anything else.
    """
    path = Path(path)
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    samples = SampleSet(path)
    differences = _differences(samples.manifest["request"], json.loads(json.dumps(request)))
    if differences:
        raise DataError(
            f"{path} holds other samples: {'; '.join(differences)}. Remove the folder or choose another data.samples"
        )
    return samples


def write_samples(
    out_dir: str | Path,
    splits: Mapping[str, Iterable[PackedRow]],
    *,
    seq_length: int,
    packing: str,
    tokenizer_identity: Mapping[str, Any],
    corpus_identity: Mapping[str, Any],
    selection: Mapping[str, Any],
) -> SampleSet:
    """Writes a set of samples, split behind split, and publishes it whole: a crash leaves nothing under its name.

    The rows are streamed. Where a set of the same request stands already, that one is returned and ``splits`` is not
    read; of several racing writers one publishes and the others return its set.

    Raises:
        DataError: where ``out_dir`` holds anything else, naming the differences, or a token is outside the vocabulary.
    """
    out_dir = Path(out_dir)
    request = sample_request(
        seq_length=seq_length,
        packing=packing,
        tokenizer_identity=tokenizer_identity,
        corpus_identity=corpus_identity,
        selection=selection,
    )
    existing = find_samples(out_dir, request)
    if existing is not None:
        return existing
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    temporary = out_dir.with_name(f".{out_dir.name}.{uuid.uuid4().hex}.tmp")
    temporary.mkdir()
    try:
        within = packing in WITHIN_DOCUMENTS
        counts = _write_arrays(temporary, splits, seq_length, int(tokenizer_identity["vocab_size"]), within)
        manifest = {"format_version": FORMAT_VERSION, **counts, "tokenizer": dict(tokenizer_identity)}
        write_json(temporary / MANIFEST, manifest | {"request": request})
        try:
            os.rename(temporary, out_dir)  # takes the place of an empty folder only
        except OSError:
            winner = find_samples(out_dir, request)
            if winner is None:
                raise
            return winner
        fsync_directory(out_dir.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return SampleSet(out_dir)


def _write_arrays(
    folder: Path, splits: Mapping[str, Iterable[PackedRow]], seq_length: int, vocab_size: int, within_documents: bool
) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    rows_of_split: dict[str, int] = {}
    with ExitStack() as stack:
        tokens = stack.enter_context(NpyWriter(folder / "tokens.npy", np.dtype(np.int32), (seq_length,)))
        masks = stack.enter_context(NpyWriter(folder / "loss_mask.npy", np.dtype(np.uint8), (seq_length,)))
        offsets = stack.enter_context(NpyWriter(folder / "document_offsets.npy", np.dtype(np.int32)))
        row_offsets = stack.enter_context(NpyWriter(folder / "row_offsets.npy", np.dtype(np.int64)))
        row_offsets.append(np.zeros(1, np.int64))
        buffer: list[PackedRow] = []

        def flush() -> None:
            if not buffer:
                return
            starts = offsets.rows + np.cumsum([len(row.document_offsets) for row in buffer], dtype=np.int64)
            tokens.append(np.stack([row.tokens for row in buffer]))
            masks.append(np.stack([row.loss_mask for row in buffer]))
            offsets.append(np.concatenate([row.document_offsets for row in buffer]))
            row_offsets.append(starts)
            buffer.clear()

        for split, rows in splits.items():
            before = tokens.rows
            for row in rows:
                if row.tokens.min() < 0 or row.tokens.max() >= vocab_size:
                    raise DataError(f"a row holds token ids outside the tokenizer's vocabulary of {vocab_size}")
                add_to_digest(digest, row, within_documents)
                buffer.append(row)
                if len(buffer) == _ROWS_PER_WRITE:
                    flush()
            flush()
            rows_of_split[split] = tokens.rows - before
        return {
            "samples": tokens.rows,
            "splits": rows_of_split,
            "document_offsets": offsets.rows,
            "content": digest.hexdigest(),
        }


def _differences(there: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    """One phrase for each leaf that two requests do not share."""
    found = []
    for key in sorted(there.keys() | asked.keys()):
        a, b = there.get(key), asked.get(key)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            found += _differences(a, b, f"{prefix}{key}.")
        elif a != b:
            found.append(f"{prefix}{key} is {a!r} there, {b!r} asked")
    return found
