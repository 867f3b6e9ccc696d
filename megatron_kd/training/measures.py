"""Speed and memory of a step, over all ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
import torch.distributed as dist

from megatron_kd.data.samples import SampleSet
from megatron_kd.device import can_reset_peak_memory, current_device, lost_ranks_reported, synchronize
from megatron_kd.models.flops import PEAK_FLOPS
from megatron_kd.models.step_flops import step_flops
from megatron_kd.training.phases import BETWEEN, OUTSIDE, STEP_PHASES, Phases
from megatron_kd.training.session import Session
from megatron_kd.training.step import StepResult

# Of a large corpus, the first rows tell how long its documents are.
_ROWS_LOOKED_AT = 2048


class Measures:
    """Measures the steps of a run; its methods are collective over all ranks."""

    def __init__(self, session: Session, phases: Phases) -> None:
        self._recipe = session.recipe
        self._phases = phases
        # Without an online teacher there is nothing to time, and one rank alone has nothing to reduce.
        self._timed = [name for name in STEP_PHASES if name != "teacher" or session.recipe.teacher.mode == "online"]
        self._documents = document_lengths(session.samples, session.train_rows[:_ROWS_LOOKED_AT])

    def step(self, done: StepResult, seconds: float, waited_s: float) -> dict[str, float]:
        """Adds speed and memory to what a step reports.

        The slowest rank's time, waiting for data included, and of every phase that of the rank where it took longest;
        the fullest rank's memory, in all and by phase, since the call before.

        Args:
            seconds: of the whole step on this rank.
            waited_s: of that, what this rank waited for its rows.
        """
        spent, peaks = self._phases.seconds(), self._phases.take_peaks([*STEP_PHASES, OUTSIDE])
        memory = [*self._timed, OUTSIDE] if can_reset_peak_memory() else [OUTSIDE]
        most, mean = _over_ranks(
            [
                seconds,
                waited_s,
                *(spent.get(name, 0.0) for name in self._timed),
                *(float(peaks.get(name, 0)) for name in memory),
            ]
        )
        slowest, fullest = most[2 : 2 + len(self._timed)], most[2 + len(self._timed) :]
        index = self._timed.index("forward_backward")
        metrics = {
            **done.metrics,
            **self._speed(most[0], done.tokens),
            **{f"time/{name}_s": value for name, value in zip(self._timed, slowest, strict=True)},
            "time/imbalance": slowest[index] / mean[2 + index] if mean[2 + index] else 1.0,
            "memory/peak_gib": max(fullest) / 2**30,
            "data/cache_wait_s": most[1],
        }
        if len(memory) > 1:
            named = zip(memory, fullest, strict=True)
            metrics |= {f"memory/peak_{name}_gib": value / 2**30 for name, value in named if name != OUTSIDE}
        return metrics

    def _speed(self, seconds: float, trained_tokens: int) -> dict[str, float]:
        recipe = self._recipe
        flops = step_flops(recipe, trained_tokens, self._documents)
        rate = seconds * recipe.world_size
        metrics = {
            "perf/step_time_s": seconds,
            "perf/tokens_per_s_per_gpu": recipe.training.global_batch_size * recipe.data.seq_length / rate,
            "perf/tflops_per_gpu": flops.student / rate / 1e12,
            "perf/tflops_per_gpu_with_teacher": (flops.student + flops.teacher) / rate / 1e12,
            "perf/tflops_per_gpu_executed": flops.executed / rate / 1e12,
        }
        peak_flops = PEAK_FLOPS.get(recipe.cluster.gpu)
        if peak_flops is not None and recipe.training.precision == "bf16":
            metrics["perf/mfu"] = flops.student / rate / peak_flops
            metrics["perf/hfu"] = flops.executed / rate / peak_flops
        return metrics

    @contextmanager
    def between(self, name: str) -> Iterator[dict[str, float]]:
        """A checkpoint or an evaluation between two steps: a phase, whose time and memory the dict holds at its end.

        Where the block raises there is no exchange: the other ranks raise as well.
        """
        assert name in BETWEEN
        spent: dict[str, float] = {}
        started = time.perf_counter()
        with self._phases(name):
            yield spent
            synchronize()
        seconds = time.perf_counter() - started
        most, _ = _over_ranks([seconds, float(self._phases.take_peaks([name]).get(name, 0))])
        spent[f"time/{name}_s"] = most[0]
        if most[1]:
            spent[f"memory/peak_{name}_gib"] = most[1] / 2**30


@lost_ranks_reported()
def _over_ranks(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """(largest, mean) of each value over all ranks, by one exchange. Collective."""
    mine = torch.tensor(values, dtype=torch.float64, device=current_device())
    every = mine.new_empty(dist.get_world_size() * len(values))
    dist.all_gather_into_tensor(every, mine)
    every = every.view(-1, len(values))
    both = torch.stack([every.amax(dim=0), every.mean(dim=0)]).tolist()
    return both[0], both[1]


def document_lengths(samples: SampleSet, rows: Sequence[int]) -> list[int] | None:
    """Lengths of the documents in some rows, where each document sees itself alone; None where a row is seen whole."""
    if not samples.within_documents:
        return None
    lengths: list[int] = []
    for row in rows:
        bounds = [*samples.document_offsets(row).tolist(), samples.seq_length]
        lengths += [end - begin for begin, end in pairwise(bounds) if end > begin]
    return lengths
