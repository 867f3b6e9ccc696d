"""Samples, a teacher that knows them, and other systems' files of its answers, for the tests of the importers."""

from __future__ import annotations

import argparse
import io
import json
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_kd.cache.importers import open_source
from megatron_kd.cache.importers.source import Source
from megatron_kd.data.packing import concatenate
from megatron_kd.data.sample_writer import write_samples
from megatron_kd.data.samples import SampleSet

LENGTH = 16
VOCAB = 90
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


def make_samples(folder: Path, rows: int, vocab: int = VOCAB, length: int = LENGTH) -> SampleSet:
    """Random documents, packed as ``prepare`` packs them."""
    rng = np.random.default_rng(rows)
    documents = [rng.integers(1, vocab, 13, dtype="i4") for _ in range(rows * length // 13 + 1)]
    packed = list(concatenate(documents, length, eos_id=0))[:rows]
    assert len(packed) == rows
    return write_samples(
        folder,
        {"train": packed},
        seq_length=length,
        packing="concatenate",
        tokenizer_identity={"name": "toy", "sha256": "ab", "vocab_size": vocab},
        corpus_identity={"name": "toy"},
        selection={},
    )


def teacher_logits(samples: SampleSet, sample: int, vocab: int = VOCAB) -> torch.Tensor:
    """float32 [L, V]: noise, and the next token high at most positions."""
    generator = torch.Generator().manual_seed(1000 + sample)
    logits = torch.randn(samples.seq_length, vocab, generator=generator) * 2
    following = torch.from_numpy(np.append(samples.tokens(sample)[1:], 0).astype("i8"))
    known = torch.rand(samples.seq_length, generator=generator) < 0.8
    logits[torch.arange(samples.seq_length)[known], following[known]] += 7
    return logits


def opened(path: Path, samples: SampleSet, vocab: int = VOCAB, **options: Any) -> Source:
    """The tars of a folder."""
    return open_source("megatron-lm", path, samples, vocab_size=vocab, **options)


@contextmanager
def megatron_args(**values: Any) -> Iterator[argparse.Namespace]:
    """Megatron-LM's global arguments while its saver works."""
    from megatron.training import global_vars

    before = global_vars._GLOBAL_ARGS
    global_vars._GLOBAL_ARGS = argparse.Namespace(
        seed=1, data_path=None, data_args_path=None, per_split_data_args_path=None, **values
    )
    global_vars._GLOBAL_ARGS.train_data_path = global_vars._GLOBAL_ARGS.valid_data_path = None
    global_vars._GLOBAL_ARGS.test_data_path = None
    try:
        yield global_vars._GLOBAL_ARGS
    finally:
        global_vars._GLOBAL_ARGS = before


def zigzag_positions(length: int, cp: int, rank: int) -> list[int]:
    """Which positions a context-parallel rank has, one by one."""
    chunk = length // (2 * cp) if cp > 1 else length
    mine = (rank, 2 * cp - 1 - rank) if cp > 1 else (0,)
    return [position for position in range(length) if position // chunk in mine]


def write_first_layout(
    folder: Path,
    samples: SampleSet,
    *,
    cp: int = 1,
    dp: int = 1,
    micro_batch: int = 1,
    micro_batches: int = 2,
    per_tar: int = 2,
    k: int = 5,
    p: float | None = None,
    save_dtype: str = "fp16",
    vocab: int = VOCAB,
    first_iteration: int = 0,
    order: list[int] | None = None,
) -> None:
    """Lets Megatron-LM's own saver write the run of every rank, its own sampler saying who sees which sample.

    Everything of the saver runs but its constructor, which asks the process groups for what is given here.

    Args:
        order: the sample that the run sees in each place, by default all in their order.
    """
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler
    from megatron.training.distillation.logits_saver import LogitsSaverHooks
    from megatron.training.distillation.utils_logits import compute_dataset_hash

    order = list(range(len(samples))) if order is None else order
    batch = dp * micro_batch * micro_batches
    assert len(order) % batch == 0
    with megatron_args(seq_length=samples.seq_length, train_samples=len(order)) as args:
        digest, identifiers = compute_dataset_hash()
        saver_settings = {"k": k, "p": p, "min_k": 1, "save_dtype": save_dtype}
        meta = {"hash": digest, "identifiers": identifiers, "saver": saver_settings}
        for c in range(cp):
            for d in range(dp):
                saver: Any = LogitsSaverHooks.__new__(LogitsSaverHooks)
                vars(saver).update(
                    _save_dtype=TYPES[save_dtype], save_dir=str(folder), k=k, p=p, min_k=1, tp_rank=0, tp_size=1
                )
                vars(saver).update(cp_rank=c, dp_rank=d, _pending_writes={}, _topp_kept_counts=[])
                saver._meta_bytes = json.dumps(meta).encode()
                batches = list(MegatronPretrainingSampler(len(order), 0, micro_batch, d, dp))
                positions = zigzag_positions(samples.seq_length, cp, c)
                for iteration in range(len(order) // batch):
                    args.curr_iteration = first_iteration + iteration
                    saver._accumulated_results = [
                        saver._process_single_microbatch(
                            torch.stack([teacher_logits(samples, order[i], vocab)[positions] for i in micro], 1)
                        )
                        for micro in batches[iteration * micro_batches :][:micro_batches]
                    ]
                    saver._save_accumulated_log_probs()
                    if (iteration + 1) % per_tar == 0 or iteration + 1 == len(order) // batch:
                        saver._write_batched_tar(*saver.take_pending_data())


def write_second_layout(
    folder: Path,
    samples: SampleSet,
    *,
    dp: int = 1,
    micro_batch: int = 1,
    batch: int = 4,
    k: int = 5,
    vocab: int = VOCAB,
) -> None:
    """One tar for each rank and two spans, as the format is specified."""
    folder.mkdir()
    saver = {"k": k, "p": None, "min_k": 1, "save_dtype": "fp16", "format_version": 2}
    saver |= {"mbs_save": micro_batch, "dp_size_save": dp, "gbs_save": batch, "cp_size_save": 1}
    meta = {"hash": "h", "identifiers": {"seed": 1, "train_samples": len(samples)}, "saver": saver}
    spans = [(start, start + batch) for start in range(0, len(samples), batch)]
    for d in range(dp):
        for pair in (spans[i : i + 2] for i in range(0, len(spans), 2)):
            entries = {}
            for start, stop in pair:
                mine = [x for x in range(start, stop) if (x - start) // micro_batch % dp == d]
                logits = torch.stack([teacher_logits(samples, x, vocab) for x in mine], 1)
                values, ids = torch.log_softmax(logits, -1).topk(k)
                entries[f"{start}-{stop}.pt.zst"] = saved(
                    {
                        "values": values.half(),
                        "indices_low": (ids & 0xFFFF).to(torch.uint16),
                        "bit_17": torch.from_numpy(np.packbits((ids >> 16).numpy().astype(bool).ravel())),
                        "cu_seqlens_padded": None,
                        "format_version": 2,
                    }
                )
            write_tar(folder / f"dp{d}__{pair[0][0]}-{pair[-1][1]}.tar", {"_meta.json": json.dumps(meta), **entries})


def saved(tensors: Any) -> bytes:
    """A member's bytes: what ``torch.save`` writes, in one zstd frame."""
    import zstandard

    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    return zstandard.ZstdCompressor(level=3).compress(buffer.getvalue())


def write_tar(path: Path, entries: dict[str, bytes | str]) -> None:
    """A tar of plain members in their order."""
    with tarfile.open(path, "w") as tar:
        for name, content in entries.items():
            data = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def read_tar(path: Path) -> dict[str, bytes]:
    """All members of a tar."""
    with tarfile.open(path) as tar:
        return {info.name: tar.extractfile(info).read() for info in tar}  # type: ignore[union-attr]
