"""``cache fidelity``: what storing the top K loses against the teacher's dense distribution, on a few probe rows.

Measured for many K, value dtypes and tails at once, and, where the recipe's cache exists, of its own rows.

b = 1 row at a time, s positions, D hidden, V vocabulary, Vl rows of the head on this rank, c positions of a chunk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_kd.cache.store import cache_exists, open_cache
from megatron_kd.cache.values import ROUNDING
from megatron_kd.config import Recipe
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.context_slice import WHOLE
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.device import any_rank, current_device, fail_together
from megatron_kd.errors import CacheError, ConfigError, DataError
from megatron_kd.losses import default_chunk_bytes
from megatron_kd.losses.collectives import TensorParallelGroup
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import load_weights
from megatron_kd.models.head import head_of
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.progress import progress
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.capture_cache import check_samples
from megatron_kd.teacher.fidelity_cache import CacheFidelity, RowFidelity, worst_of
from megatron_kd.teacher.fidelity_report import FidelityReport, FidelitySums
from megatron_kd.teacher.fidelity_rows import DenseRows, dense_log_probs
from megatron_kd.teacher.megatron_engine import MegatronTeacher
from megatron_kd.teacher.topk import chunk_rows, extract_top_k

HELDOUT = "heldout"
STAND_IN = 2.0
"""Where there is no trained student, the teacher at this many times the temperature stands for one."""
TOLERANCE = {"fp32": 1e-3, "bf16": 0.25}
"""Nats by which a cached value may differ from the dense teacher's beyond its own rounding: the same forward pass in
another batch or layout is rounded elsewhere, by little in fp32 and by some 2⁻⁸ of a logit in bf16."""
BUFFERS = 20
"""A chunk takes the memory of so many float32 matrices [c, Vl]; ``loss.chunk_mib`` is the budget of them all."""


def measure_fidelity(
    recipe: Recipe, rows: int = 8, student: str | None = None, *, show_progress: bool = True
) -> FidelityReport:
    """Compares stored forms, and the recipe's cache if it exists, with the dense teacher. Collective over all ranks.

    Args:
        rows: how many rows of the held-out split (of the first split where there is none), from the first one on.
        student: a checkpoint of the recipe's student, on whose gradient the error is measured; without it
            ``student.checkpoint``, without that the teacher at ``STAND_IN`` times the temperature. A student cut out of
            the teacher and not yet trained is no measure: it is further from the teacher than a uniform distribution.

    Raises:
        ConfigError, DataError, CheckpointError: before any work.
        CacheError: the cache is incomplete, of another teacher, tokenizer or corpus, or its values are at another
            temperature. A row of it that cannot be read is reported, not raised.
    """
    if rows < 1:
        raise ConfigError(f"--rows is {rows}, must be at least 1")
    _check_layout(recipe)
    groups = join_ranks(recipe)
    with fail_together("opening the samples"):
        samples = open_samples(recipe.data.samples)
        check_samples(recipe, samples)
        split, probe = probe_rows(samples, rows)
    teacher = MegatronTeacher(recipe, groups)
    with fail_together("opening the cache"):
        cached = _open_cache(recipe, samples, teacher)
    job = _Job(recipe, groups, samples, teacher, cached, student)
    mine = list(probe)[groups.dp_rank :: groups.dp_size]
    show = show_progress and groups.is_first_rank
    checked: list[RowFidelity] = []
    with progress("fidelity", len(mine), unit="rows", enabled=show) as advance:
        for sample in mine:
            checked += job.measure(sample)
            advance(1)
    job.sums.reduce(groups.dp_group)
    if not job.sums.tokens:
        raise DataError(f"no position of samples {probe.start} to {probe.stop - 1} trains: raise --rows")
    everyone: list[Any] = [None] * groups.dp_size
    dist.all_gather_object(everyone, checked, group=groups.dp_group)
    by_sample = sorted((row for part in everyone for row in part), key=lambda row: row.sample)
    return FidelityReport(
        teacher=recipe.teacher.model.name,
        student=job.student_name,
        temperature=job.temperature,
        samples=str(samples.path),
        split=split,
        probe=(probe.start, probe.stop),
        value_dtype=recipe.teacher.capture.value_dtype,
        top_k=recipe.teacher.top_k,
        sums=job.sums,
        cache=None if cached is None else CacheFidelity.of(str(recipe.teacher.cache), by_sample, job.tolerance),
    )


def _check_layout(recipe: Recipe) -> None:
    """Ranks go through rows of their own, one at a time: they share neither layers nor positions nor experts."""
    for axis in ("pipeline_model", "context", "expert_model"):
        size = getattr(recipe.parallelism, f"{axis}_parallel_size")
        if size > 1:
            raise ConfigError(
                f"cache fidelity runs at parallelism.{axis}_parallel_size 1, not {size}: set it to 1 (tensor and data "
                "parallelism stay), the cache serves every layout"
            )


def probe_rows(samples: SampleSet, rows: int) -> tuple[str, range]:
    """The name of the split and the first ``rows`` of it. Raises DataError where there are not so many."""
    split = HELDOUT if samples.splits.get(HELDOUT) else next(iter(samples.splits))
    ids = samples.split(split)
    if rows > len(ids):
        raise DataError(f"the split {split!r} of {samples.path} has {len(ids)} rows, --rows asks for {rows}")
    return split, ids[:rows]


def k_ladder(top_k: int, vocab_size: int) -> list[int]:
    """1, 2, 5, 10, 20, … up to ``top_k``, itself, and three steps above it, none beyond the vocabulary."""
    steps = [factor * 10**power for power in range(len(str(vocab_size))) for factor in (1, 2, 5)]
    above = [k for k in steps if k > top_k][:3]
    return sorted({min(k, vocab_size) for k in [*(k for k in steps if k < top_k), top_k, *above]})


class _Job:
    """Two models and what is summed over the rows that this rank has seen."""

    def __init__(
        self,
        recipe: Recipe,
        groups: ParallelGroups,
        samples: SampleSet,
        teacher: MegatronTeacher,
        cached: CachedTargets | None,
        student: str | None,
    ) -> None:
        self.temperature = recipe.teacher.temperatures[0]
        self.tolerance = TOLERANCE[recipe.training.precision]
        self._groups, self._samples, self._teacher, self._cached = groups, samples, teacher, cached
        self._tp = TensorParallelGroup(groups.tp_group)
        self._vocab_size = recipe.teacher.model.vocab_size
        chunk_mib = recipe.loss.chunk_mib
        self._chunk_bytes = default_chunk_bytes(current_device()) if chunk_mib is None else int(chunk_mib * 2**20)
        self.student_name, self._student = _load_student(recipe, groups, student or recipe.student.checkpoint)
        ks = k_ladder(recipe.teacher.top_k, self._vocab_size)
        self.sums = FidelitySums(ks, current_device())
        self._most = max(ks[-1], 0 if cached is None else cached.top_k)
        self._rounding = 0.0
        if cached is not None:
            self._rounding = ROUNDING[open_cache(str(recipe.teacher.cache)).manifest.value_dtype]

    @torch.no_grad()
    def measure(self, sample: int) -> list[RowFidelity]:
        """One row: adds to the sums. Returns what its cached targets are like; nothing where there is no cache."""
        row = self._samples.rows([sample])
        tokens = torch.from_numpy(row.tokens).to(current_device(), torch.int64)
        counted = torch.from_numpy(row.loss_mask[0] > 0).to(current_device())
        documents = None if row.documents is None else torch.from_numpy(row.documents).to(current_device())
        targets, problem = self._read_cached(sample)
        hidden, head = self._states(self._teacher.model, tokens, documents)
        student_hidden, student_head, softened = hidden, head, STAND_IN
        if self._student is not None:
            student_hidden, student_head = self._states(self._student, tokens, documents)
            softened = 1.0
        start, tp = self._groups.tp_rank * head.shape[0], self._tp
        real = max(0, min(head.shape[0], self._vocab_size - start))
        # By all rows of the shard, which are as many on every rank: chunks hold collectives.
        step = chunk_rows(hidden.shape[0], head.shape[0], self._chunk_bytes // BUFFERS)
        checks = []
        for part in (slice(first, first + step) for first in range(0, hidden.shape[0], step)):
            log_p = dense_log_probs(hidden[part], head[:real], self.temperature, tp)
            log_q = dense_log_probs(student_hidden[part], student_head[:real], self.temperature * softened, tp)
            dense = DenseRows(log_p, log_q, start, tp)
            best = self._best_ids(hidden[part], head, start)
            self.sums.add(dense, best, counted[part])
            if targets is not None:
                checks.append(RowFidelity.of(sample, part.start, dense, best, rows_of(targets, part), self._rounding))
        if problem is not None:
            return [RowFidelity(sample=sample, problem=problem)]
        return [worst_of(checks)] if checks else []

    def _best_ids(self, hidden: Tensor, head: Tensor, start: int) -> Tensor:
        """The ids that a capture keeps, int32 [c, most]."""
        extracted = extract_top_k(
            hidden,
            head,
            self._most,
            vocab_size=self._vocab_size,
            vocab_start=start,
            temperature=self.temperature,
            group=self._groups.tp_group,
            chunk_bytes=self._chunk_bytes,
        )
        return extracted.targets.ids

    def _states(self, model: GPTModel, tokens: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
        """tokens [1, s] → the last hidden states of all positions [s, D] and this rank's shard of the head [Vl, D]."""
        seen: dict[str, Tensor] = {}

        def keep(*, hidden_states: Tensor, output_layer: Any, output_weight: Tensor | None, **_: Any) -> Tensor:
            seen["head"] = head_of(output_layer, output_weight)
            return hidden_states

        hidden: Tensor = model(tokens, WHOLE.places(tokens, documents), documents, output_processor=keep)
        if self._groups.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=self._groups.tp_group)
        return hidden.reshape(-1, hidden.shape[-1]), seen["head"]

    def _read_cached(self, sample: int) -> tuple[TopKTargets | None, str | None]:
        """The cached targets of a row, or why they cannot be read; the same answer on all ranks of a TP group."""
        if self._cached is None:
            return None, None
        targets, problem = None, None
        try:
            targets = self._cached.targets([sample]).to(current_device())
        except CacheError as error:
            problem = str(error)
        group = self._groups.tp_group
        if group is not None and any_rank(problem is not None, group):
            problem = problem or f"sample {sample} cannot be read on another rank"
        return (targets if problem is None else None), problem


def rows_of(targets: TopKTargets, part: slice) -> TopKTargets:
    """A few rows of flat targets."""
    return TopKTargets(targets.ids[part], targets.logprobs[part], targets.tail_logmass[part], targets.temperature)


def _open_cache(recipe: Recipe, samples: SampleSet, teacher: MegatronTeacher) -> CachedTargets | None:
    """The recipe's cache, shown to be of these samples and this teacher; None where none was captured yet."""
    if recipe.teacher.cache is None or not cache_exists(recipe.teacher.cache):
        return None
    manifest = open_cache(recipe.teacher.cache).manifest
    temperature = recipe.teacher.temperatures[0]
    if manifest.temperatures[0] != temperature:
        raise CacheError(
            f"{recipe.teacher.cache} stores values at temperature {manifest.temperatures[0]:g}, the first of "
            f"teacher.temperatures is {temperature:g}: put {manifest.temperatures[0]:g} first"
        )
    return CachedTargets(
        recipe.teacher.cache,
        samples,
        teacher=recipe.teacher.model,
        top_k=manifest.top_k,
        temperature=temperature,
        weights_sha256=teacher.identity()["weights_sha256"],
    )


def _load_student(recipe: Recipe, groups: ParallelGroups, checkpoint: str | None) -> tuple[str, GPTModel | None]:
    """What the gradient is measured on, in words, and the model; None for the teacher at ``STAND_IN`` temperatures."""
    if checkpoint is None:
        return f"the teacher at {STAND_IN:g} times its temperature", None
    model = recipe.student.model
    built = build_model(model, recipe.parallelism, groups, recipe.training.precision, trainable=False)
    load_weights(built, model, Path(checkpoint))
    return f"{model.name} from {checkpoint}", built
