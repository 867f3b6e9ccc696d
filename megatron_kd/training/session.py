"""What training and evaluation share: joined ranks, checked data, a teacher where one is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_kd.cache.store import cache_exists
from megatron_kd.config import Recipe
from megatron_kd.data.cached_targets import CachedTargets
from megatron_kd.data.row_join import share
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.data.steps import train_rows
from megatron_kd.device import any_rank, fail_together
from megatron_kd.errors import CacheError
from megatron_kd.models.checkpoint import read_note
from megatron_kd.models.launch import join_ranks
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.teacher.capture_cache import check_samples
from megatron_kd.teacher.online import OnlineTeacher
from megatron_kd.training.distill import Distillation
from megatron_kd.training.evaluate import SPLIT

OPENING = "opening the data"


@dataclass(frozen=True)
class Session:
    """One rank of a run, ready to build a student.

    Attributes:
        train_rows: the sample ids to train on.
        cached: targets of the samples; None online.
        evaluation_cached: targets for the held-out rows: the cache even online, where there is a fitting one, so that
            online and offline runs are measured by the same yardstick.
        evaluation: the distillation that goes with ``evaluation_cached``.
    """

    recipe: Recipe
    groups: ParallelGroups
    samples: SampleSet
    train_rows: range
    cached: CachedTargets | None
    distillation: Distillation
    evaluation_cached: CachedTargets | None
    evaluation: Distillation

    @property
    def is_first(self) -> bool:
        """Whether this rank speaks for the job."""
        return self.groups.is_first_rank


def open_session(recipe: Recipe, *, for_evaluation: bool = False) -> Session:
    """Joins the ranks and checks samples and cache against the recipe before any model is built. Collective.

    Args:
        for_evaluation: an online teacher is built only if there is no cache to evaluate with.

    Raises:
        LaunchError, ConfigError, DataError, CacheError, CheckpointError: on every rank.
    """
    groups = join_ranks(recipe)
    online = recipe.teacher.mode == "online"
    with fail_together(OPENING):
        samples = open_samples(recipe.data.samples)
        check_samples(recipe, samples)
        rows = train_rows(samples, recipe.data.train_tokens)
        cached = None if online else open_cached_targets(recipe, samples, (dist.get_rank(), dist.get_world_size()))
        evaluation_cached = cached
        if online and recipe.teacher.cache is not None and cache_exists(recipe.teacher.cache):
            evaluation_cached = open_cached_targets(recipe, samples, (dist.get_rank(), dist.get_world_size()))
    if any_rank(evaluation_cached is not None and not evaluation_cached.joined):
        with fail_together(OPENING):
            if evaluation_cached is None:
                raise CacheError(f"the cache {recipe.teacher.cache} is there for other ranks and not for this one")
        assert evaluation_cached is not None
        evaluation_cached.join(OPENING)
    with fail_together(OPENING):
        if evaluation_cached is not None:
            # Every rank looks at its share of what the run may read; where one finds fault, all end here. Neighbours
            # go to one rank, which then reads few commit records.
            rank, ranks = dist.get_rank(), dist.get_world_size()
            for read in (rows, samples.splits.get(SPLIT, range(0))):
                evaluation_cached.check_rows(share(read, rank, ranks))
    needs_teacher = online and not (for_evaluation and evaluation_cached is not None)
    teacher = OnlineTeacher(recipe, groups) if needs_teacher else None
    offline_view = Distillation(as_offline(recipe), groups, None)
    distillation = Distillation(recipe, groups, teacher) if teacher is not None or not online else offline_view
    evaluation = offline_view if evaluation_cached is not None else distillation
    return Session(recipe, groups, samples, rows, cached, distillation, evaluation_cached, evaluation)


def as_offline(recipe: Recipe) -> Recipe:
    """The same recipe with its targets from the cache."""
    teacher = recipe.teacher.model_copy(update={"mode": "offline", "targets": "top_k", "offload": False})
    return recipe.model_copy(update={"teacher": teacher})


def open_cached_targets(recipe: Recipe, samples: SampleSet, share: tuple[int, int]) -> CachedTargets:
    """The cache of a recipe against its samples; ``share`` and what is raised as in ``CachedTargets``."""
    assert recipe.teacher.cache is not None, "the recipe's own checks ask for it"
    return CachedTargets(
        recipe.teacher.cache,
        samples,
        teacher=recipe.teacher.model,
        top_k=recipe.teacher.top_k,
        temperature=recipe.loss.temperature,
        student_vocab_size=recipe.student.model.vocab_size,
        weights_sha256=_teacher_weights(recipe),
        share=share,
    )


def _teacher_weights(recipe: Recipe) -> str | None:
    """The hash of the teacher's weights; None where an offline run has only the cache."""
    if recipe.teacher.checkpoint is None or not Path(recipe.teacher.checkpoint).is_dir():
        return None
    digest: str | None = read_note(Path(recipe.teacher.checkpoint)).get("weights_sha256")
    return digest
