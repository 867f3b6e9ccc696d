"""``bench step``: training steps of a student by plain cross-entropy and by distillation, beside each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_kd.bench.neighbours import Neighbours
from megatron_kd.bench.settings import check_positive
from megatron_kd.bench.step_passes import PLAIN, StepPasses
from megatron_kd.bench.threads import torch_threads
from megatron_kd.config import Recipe, load_recipe
from megatron_kd.device import current_device, is_cuda, synchronize
from megatron_kd.errors import ConfigError
from megatron_kd.losses import IMPLEMENTATIONS
from megatron_kd.models.step_flops import step_flops
from megatron_kd.progress import progress
from megatron_kd.training.phases import OUTSIDE, STEP_PHASES

PARTS = ("forward_backward", "gradients", "optimizer")


@dataclass(frozen=True)
class StepBenchmark:
    """One row a method, plain cross-entropy first, and what a reader must know.

    A row: method; step_s, forward_backward_s, gradients_s, optimizer_s, medians over the rounds of the slowest rank's
    seconds; ratio to plain within a round: median, lowest and highest, by the clock and (cpu_ratio) by the CPU time of
    the process, which neighbours disturb less and which says nothing of a GPU; tokens_per_s of all ranks;
    tflops_per_gpu (executed); peak_gib of the fullest rank, memory of the device, on a CPU the resident set.
    """

    setting: dict[str, Any]
    results: list[dict[str, Any]]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """``setting``, ``results`` and ``notes``."""
        return {"setting": self.setting, "results": self.results, "notes": self.notes}

    def text(self) -> str:
        """A table."""
        s = self.setting
        on_cpu = s["device"] == "cpu"
        ratios = [("× plain", "ratio"), *([("× plain, CPU time", "cpu_ratio")] if on_cpu else [])]
        lines = [
            f"{s['student']}, vocabulary {s['vocab']:,}, top {s['top_k']}, {s['micro_batches']} × "
            f"{s['micro_batch_size']} × {s['seq_length']:,} tokens a rank, {s['ranks']} × {s['device']}, "
            f"{s['precision']}" + (f", {s['threads']} thread{'s' * (s['threads'] > 1)}" if on_cpu else ""),
            f"medians of {s['rounds']} interleaved rounds; × plain: median (lowest–highest) within a round",
            "",
            f"{'method':<18}{'step':>9}  {''.join(f'{title:<20}' for title, _ in ratios)}{'fwd + bwd':>9}"
            f"{'optimizer':>11}{'tokens/s':>11}{'peak':>11}",
        ]
        for row in self.results:
            cells = "".join(f"{_spread(row[key], row[f'{key}_spread']):<20}" for _, key in ratios)
            lines.append(
                f"{row['method']:<18}{row['step_s']:>7.3f} s  {cells}{row['forward_backward_s']:>7.3f} s"
                f"{row['optimizer_s']:>9.3f} s{row['tokens_per_s']:>11,.0f}{row['peak_gib']:>7.2f} GiB"
            )
        return "\n".join(lines)


def _spread(ratio: float, spread: Sequence[float]) -> str:
    return f"{ratio:.3f} ({spread[0]:.2f}–{spread[1]:.2f})"


def bench_step(
    recipe: Path,
    overrides: Sequence[str] = (),
    *,
    methods: Sequence[str] = ("fused",),
    rounds: int = 7,
    threads: int | None = None,
    show_progress: bool = True,
) -> StepBenchmark:
    """Measures whole steps of the recipe's student, random weights and random rows. Collective over all ranks.

    One model and one optimizer take the steps of all methods in turn: plain cross-entropy on labels by Megatron-Core's
    own path, and offline distillation with each implementation from targets in memory. Every position trains.

    Args:
        methods: names in ``IMPLEMENTATIONS``.
        rounds: after one that warms up.
        threads: of torch on a CPU; by default training.threads, else as they are.

    Raises:
        ConfigError: options that cannot be, an unknown method.
    """
    loaded = load_recipe(recipe, list(overrides))
    check_positive("rounds", rounds)
    check_positive("threads", threads)
    unknown = [name for name in methods if name not in IMPLEMENTATIONS]
    if unknown:
        raise ConfigError(f"--methods names {unknown[0]!r}: choose among {', '.join(IMPLEMENTATIONS)}")
    passes = StepPasses(loaded)
    order = [PLAIN, *dict.fromkeys(methods)]
    seen: dict[str, list[list[float]]] = {name: [] for name in order}
    show = show_progress and passes.groups.is_first_rank
    with (
        torch_threads(threads),
        progress("bench step", (1 + rounds) * len(order), unit="steps", enabled=show) as advance,
    ):
        neighbours = Neighbours()
        for number in range(1 + rounds):
            # What comes first alternates: what one step leaves in caches and allocators favours no method.
            for name in order if number % 2 else order[::-1]:
                figures = _measured(passes, name)
                if number:
                    seen[name].append(figures)
                advance(1, name)
        setting = _setting(loaded, rounds)
        notes = [] if is_cuda() else neighbours.notes(torch.get_num_threads())
    return StepBenchmark(setting, [_row(loaded, name, seen) for name in order], notes)


def _measured(passes: StepPasses, name: str) -> list[float]:
    """Of one step on the slowest and fullest rank.

    Seconds of the whole by the clock and of CPU time, those of ``PARTS``, then bytes at the peak.
    """
    phases = passes.student.phases
    phases.begin_memory()
    phases.begin_step()
    busy = time.process_time()
    with phases("step"):
        passes.step(name)
    synchronize()
    spent = phases.seconds()
    peaks = phases.take_peaks([*STEP_PHASES, "step", OUTSIDE])
    figures = [
        sum(spent.values()),
        time.process_time() - busy,
        *(spent.get(part, 0.0) for part in PARTS),
        float(max(peaks.values())),
    ]
    most = torch.tensor(figures, dtype=torch.float64, device=current_device())
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return most.tolist()


def _row(recipe: Recipe, name: str, seen: dict[str, list[list[float]]]) -> dict[str, Any]:
    own = seen[name]
    step, _, *parts, peak = (statistics.median(column) for column in zip(*own, strict=True))
    ratios = [[mine[i] / plain[i] for mine, plain in zip(own, seen[PLAIN], strict=True)] for i in (0, 1)]
    tokens = recipe.training.global_batch_size * recipe.data.seq_length
    executed = step_flops(recipe).student
    if name != PLAIN:
        executed = step_flops(StepPasses.offline(recipe, name)).executed
    return {
        "method": name,
        "step_s": step,
        "ratio": statistics.median(ratios[0]),
        "ratio_spread": [min(ratios[0]), max(ratios[0])],
        "cpu_ratio": statistics.median(ratios[1]),
        "cpu_ratio_spread": [min(ratios[1]), max(ratios[1])],
        **{f"{part}_s": seconds for part, seconds in zip(PARTS, parts, strict=True)},
        "tokens_per_s": tokens / step,
        "tflops_per_gpu": executed / step / recipe.world_size / 1e12,
        "peak_gib": peak / 2**30,
    }


def _setting(recipe: Recipe, rounds: int) -> dict[str, Any]:
    return {
        "student": recipe.student.model.name,
        "vocab": recipe.student.model.vocab_size,
        "top_k": recipe.teacher.top_k,
        "seq_length": recipe.data.seq_length,
        "micro_batch_size": recipe.training.micro_batch_size,
        "micro_batches": recipe.num_microbatches,
        "ranks": recipe.world_size,
        "device": current_device().type,
        "precision": recipe.training.precision,
        "threads": torch.get_num_threads(),
        "rounds": rounds,
    }
