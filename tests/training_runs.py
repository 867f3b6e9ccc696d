"""What the tests of training share: prepared folders, and training steps in whatever layout the ranks are put in.

All of it runs inside rank processes (``run_distributed``), one of which trains in several layouts after each other.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# As the command line does it, so that runs here and there give the same bits.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import numpy as np
import torch

from megatron_kd.config import Recipe, load_recipe

CURVES = ("loss/kd", "optim/grad_norm")
MASK_SEED = 11


@dataclass(frozen=True)
class Layout:
    """Ranks and portions of one run; data parallelism is what tensor, pipeline and context parallelism leave."""

    world: int
    tp: int = 1
    sp: bool = False
    micro: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    vp: int = 1

    def overrides(self) -> list[str]:
        """The overrides of a recipe that put it into this layout."""
        return [
            f"cluster.gpus_per_node={self.world}",
            f"parallelism.tensor_model_parallel_size={self.tp}",
            f"parallelism.pipeline_model_parallel_size={self.pp}",
            f"parallelism.virtual_pipeline_model_parallel_size={self.vp if self.vp > 1 else 'null'}",
            f"parallelism.context_parallel_size={self.cp}",
            f"parallelism.expert_model_parallel_size={self.ep}",
            f"parallelism.sequence_parallel={str(self.sp).lower()}",
            f"training.micro_batch_size={self.micro}",
        ]

    def __str__(self) -> str:
        axes = [f"TP {self.tp}{' + SP' if self.sp else ''}"]
        sizes = (("PP", self.pp), ("VP", self.vp), ("CP", self.cp), ("EP", self.ep))
        axes += [f"{name} {size}" for name, size in sizes if size > 1]
        return ", ".join([*axes, f"DP {self.world // (self.tp * self.pp * self.cp)}", f"micro batch {self.micro}"])


def recipe_in(recipe: Path, layout: Layout, *overrides: str) -> Recipe:
    """A recipe loaded in a layout."""
    return load_recipe(recipe, [*layout.overrides(), *overrides])


def leave_layout() -> None:
    """Takes the model-parallel groups down, so that the next run of this process may choose others. Collective."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    if dist.is_initialized():
        dist.barrier()
    parallel_state.destroy_model_parallel()


def prepare_rows(recipe: Recipe, *, masked: bool) -> None:
    """Prepares the corpus; with ``masked`` a random beginning of each row is masked, as prompts are."""
    from megatron_kd.data.packing import PackedRow
    from megatron_kd.data.prepare import prepare
    from megatron_kd.data.sample_writer import write_samples
    from megatron_kd.data.tokenizer import load_tokenizer
    from megatron_kd.models.convert import tokenizer_source

    data = recipe.data
    assert data.corpus is not None
    plain = Path(f"{data.samples}.plain" if masked else data.samples)
    samples = prepare(
        corpus_format=data.corpus.format,
        paths=data.corpus.paths,
        tokenizer=load_tokenizer(tokenizer_source(recipe)),
        seq_length=data.seq_length,
        packing=data.packing,
        truncation=data.truncation,
        train_tokens=data.train_tokens,
        heldout_tokens=data.heldout_tokens,
        out_dir=plain,
        seed=recipe.seed,
        progress=False,
    )
    if not masked:
        return
    draw = np.random.default_rng(MASK_SEED)

    def with_prompts(ids: range) -> Iterator[PackedRow]:
        for i in ids:
            mask = samples.loss_mask(i).copy()
            mask[: draw.integers(0, data.seq_length - 3)] = 0
            yield PackedRow(samples.tokens(i), mask, samples.document_offsets(i))

    write_samples(
        Path(data.samples),
        {name: with_prompts(ids) for name, ids in samples.splits.items()},
        seq_length=data.seq_length,
        packing=data.packing,
        tokenizer_identity=samples.tokenizer_identity,
        corpus_identity={"masked": True},
        selection={"seed": MASK_SEED},
    )
    shutil.rmtree(plain)


def make_inputs(recipe: Recipe, *, with_import: bool = True, masked: bool = True) -> None:
    """Teacher, samples and cache of a recipe on one rank."""
    from megatron_kd.models.convert import import_model
    from megatron_kd.teacher.capture import capture

    if with_import:
        import_model(recipe, "teacher", show_progress=False)
    prepare_rows(recipe, masked=masked)
    capture(recipe, show_progress=False)


class Trainer:
    """The pieces that ``train`` puts together, held open: steps, gradients and state can be looked at."""

    def __init__(self, recipe: Recipe) -> None:
        """Collective over all ranks; the groups of the run before are taken down."""
        from megatron_kd.training.loop import step_reader
        from megatron_kd.training.session import open_session
        from megatron_kd.training.setup import build_student, wrap_for_training

        leave_layout()
        self.recipe = recipe
        self.session = open_session(recipe)
        self.student = wrap_for_training(recipe, self.session.groups, build_student(recipe, self.session.groups))
        self._reader = step_reader(self.session)

    def step(self) -> dict[str, float]:
        """One optimizer step; its metrics."""
        from megatron_kd.training.step import train_step

        batches = self._reader(self.student.iteration)
        done = train_step(self.recipe, self.student, self.session.distillation, self.session.groups, batches)
        self.student.iteration += 1
        self.student.consumed_samples += self.recipe.training.global_batch_size
        self.student.tokens += done.tokens
        return {**done.metrics, "tokens": done.tokens}

    def curve(self, steps: int) -> list[dict[str, float]]:
        """The metrics of the next steps."""
        return [self.step() for _ in range(steps)]

    def gradients(self) -> dict[str, np.ndarray[Any, Any]]:
        """The reduced gradients the last step left, by parameter name; under tensor parallelism this rank's shards."""
        module = self.student.model.module
        return {name: p.main_grad.detach().double().numpy().copy() for name, p in module.named_parameters()}


def curve_of(recipe: Recipe, steps: int) -> list[dict[str, float]]:
    """The metrics of a new run's first steps. Collective."""
    return Trainer(recipe).curve(steps)


def largest_difference(
    one: list[dict[str, float]], other: list[dict[str, float]], names: tuple[str, ...] = CURVES
) -> float:
    """The largest relative difference between two curves of equal length, over the metrics named."""
    assert len(one) == len(other) > 0
    return max(abs(a[name] - b[name]) / abs(a[name]) for a, b in zip(one, other, strict=True) for name in names)


def losses_of(records: list[dict[str, Any]]) -> list[tuple[int, float, float]]:
    """(iteration, loss/kd, optim/grad_norm) of each line, to be compared bit by bit."""
    return [(r["iteration"], r["loss/kd"], r["optim/grad_norm"]) for r in records]


def position_ids(tokens: torch.Tensor) -> torch.Tensor:
    """0 … s − 1 for every row of tokens [b, s]."""
    return torch.arange(tokens.shape[1]).expand_as(tokens)
