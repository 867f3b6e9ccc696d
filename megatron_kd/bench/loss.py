"""``bench loss``: time, counted bytes and counted FLOPs of every implementation and peer beside three bare GEMMs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megatron_kd.bench.cases import OWN, Case, floor_rows, own_cases
from megatron_kd.bench.inputs import make_inputs
from megatron_kd.bench.measure import OUT_OF_MEMORY, Measurement, measure
from megatron_kd.bench.memory import bounded_host_memory, is_out_of_memory, release_memory
from megatron_kd.bench.neighbours import Neighbours
from megatron_kd.bench.peers import Peer, available_peers
from megatron_kd.bench.published import published_figures, published_table
from megatron_kd.bench.settings import (
    CPU_CHUNK_MIB,
    DTYPES,
    GPU_CHUNK_MIB,
    Setting,
    check_budget,
    check_positive,
    choose_device,
    choose_setting,
)
from megatron_kd.bench.table import result_tables
from megatron_kd.bench.threads import torch_threads
from megatron_kd.device import select_device
from megatron_kd.device.platform import CPU_NAME
from megatron_kd.progress import Advance, progress


@dataclass(frozen=True)
class LossBenchmark:
    """One row of the result. A case that ran out of memory has no time, ratio or bytes.

    Attributes:
        seconds_median: over the rounds, forward and backward (forward alone for ``no_grad``).
        ratio_to_floor: median over the rounds of the time divided by the floor's time in the same round.
        extra_bytes: peak bytes of tensors made during a pass, gradients included.
        flops: of all matrix products.
    """

    implementation: str
    mode: str
    tokens: int
    hidden: int
    vocab: int
    top_k: int
    device: str
    seconds_median: float | None
    ratio_to_floor: float | None
    extra_bytes: int | None
    flops: int | None


@dataclass(frozen=True)
class LossReport:
    """The rows, one per token number, implementation and mode, and what a reader of them must know."""

    setting: Setting
    results: list[dict[str, Any]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """``results`` and ``notes``; with the sizes of the published toy ``published`` as well."""
        published = published_figures(self.setting)
        return {"results": self.results, "notes": self.notes, **({"published": published} if published else {})}

    def text(self) -> str:
        """One table for each token number; with the sizes of the published toy a comparison with its figures."""
        return "\n\n".join([*result_tables(self.setting, self.results), *published_table(self.setting, self.results)])


def bench_loss(
    *,
    tokens: Sequence[int] | None = None,
    hidden: int | None = None,
    vocab: int | None = None,
    top_k: int | None = None,
    dtype: str | None = None,
    published: bool = False,
    chunk_mib: float | None = None,
    device: str = CPU_NAME,
    threads: int | None = None,
    rounds: int = 7,
    show_progress: bool = True,
) -> LossReport:
    """Measures the floor, our implementations in all modes, and the peers that are installed, at each token number.

    Args:
        tokens: token numbers N; this and the next four: see ``choose_setting`` for what stands in for None.
        hidden: D.
        vocab: V.
        top_k: K.
        dtype: of hidden states and head, ``fp32`` or ``bf16``.
        published: take the published toy for what is not given.
        chunk_mib: budget of the chunk buffers in MiB; by default 64 on a CPU, 1536 on a GPU.
        device: ``cpu``, ``cuda`` or ``auto``.
        threads: of torch on the CPU; by default left as they are.

    Raises:
        ConfigError: sizes that cannot be, an unknown dtype, no such device.
    """
    check_positive("rounds", rounds)
    check_budget(chunk_mib)
    check_positive("threads", threads)
    name = choose_device(device)
    on_cpu = name == CPU_NAME
    setting = choose_setting(
        tokens=tokens, hidden=hidden, vocab=vocab, top_k=top_k, dtype=dtype, published=published, on_gpu=not on_cpu
    )
    place = select_device(name)
    chunk_bytes = int((chunk_mib or (CPU_CHUNK_MIB if on_cpu else GPU_CHUNK_MIB)) * 2**20)
    peers, notes = available_peers(place)
    results: list[dict[str, Any]] = []
    passes = len(setting.tokens) * (1 + len(OWN) + len(peers)) * (1 + rounds)
    with (
        torch_threads(threads),
        bounded_host_memory() if on_cpu else nullcontext(),
        progress("bench loss", passes, unit="passes", enabled=show_progress) as advance,
    ):
        neighbours = Neighbours()
        for number in setting.tokens:
            try:
                more, remarks = _at(number, setting, peers, chunk_bytes, rounds, place, advance)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                more, remarks = [], [f"{number:,} tokens are left out: not even the inputs fit into memory"]
            results += more
            notes += remarks
        if on_cpu:
            notes += neighbours.notes(torch.get_num_threads())
    return LossReport(setting, results, notes + _remarks(peers, setting, results))


def _remarks(peers: Sequence[Peer], setting: Setting, results: Sequence[dict[str, Any]]) -> list[str]:
    """One line for each peer that has a remark, about the most tokens at which it ran."""
    lines = []
    for peer in peers:
        ran = [
            row["tokens"] for row in results if row["implementation"] == peer.name and row["extra_bytes"] is not None
        ]
        remark = peer.remark(max(ran), setting) if ran else ""
        lines += [f"{peer.name}: {remark}"] if remark else []
    return lines


def _at(
    tokens: int,
    setting: Setting,
    peers: Sequence[Peer],
    chunk_bytes: int,
    rounds: int,
    place: torch.device,
    advance: Advance,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows and notes of one token number."""
    inputs = make_inputs(tokens, setting.hidden, setting.vocab, setting.top_k, DTYPES[setting.dtype], place)
    cases = [*own_cases(inputs, chunk_bytes), *(peer.case(inputs) for peer in peers)]
    found = measure(cases, rounds, place, advance)
    rows, notes = rows_of(cases, found, setting, tokens, place)
    itemsize = DTYPES[setting.dtype].itemsize
    if floor_rows(tokens, setting.vocab, itemsize) < tokens:
        notes.insert(0, f"at {tokens:,} tokens the floor's GEMMs take the rows in slices of 4 GiB of logits")
    del inputs, cases  # the next, larger inputs must find their memory free
    release_memory(place)
    return rows, notes


def rows_of(
    cases: Sequence[Case],
    found: Sequence[Measurement],
    setting: Setting,
    tokens: int,
    place: torch.device,
) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of ``LossBenchmark``, and a note for each peer that failed and has none. The first case is the floor."""
    rows, notes = [], []
    for case, seen in zip(cases, found, strict=True):
        if seen.failure not in (None, OUT_OF_MEMORY):
            notes.append(f"{case.name} failed at {tokens:,} tokens: {seen.failure}")
            continue
        row = LossBenchmark(
            implementation=case.implementation,
            mode=case.mode,
            tokens=tokens,
            hidden=setting.hidden,
            vocab=setting.vocab,
            top_k=setting.top_k,
            device=str(place),
            seconds_median=seen.seconds_median,
            ratio_to_floor=seen.ratio_to(found[0]),
            extra_bytes=seen.extra_bytes,
            flops=seen.flops,
        )
        rows.append(asdict(row))
    return rows, notes
