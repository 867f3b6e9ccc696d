"""A student's first weights, cut out of its teacher as the recipe says."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_kd.config import FromTeacherConfig, Recipe
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.data.steps import train_rows
from megatron_kd.device import fail_together, first_rank_tells
from megatron_kd.errors import ConfigError
from megatron_kd.files import write_json
from megatron_kd.models.build import build_model
from megatron_kd.models.checkpoint import check_checkpoint, check_same_architecture, load_weights, read_note
from megatron_kd.models.checkpoint_tensors import CheckpointWeights
from megatron_kd.models.cut import CutWeights
from megatron_kd.models.cut_scores import largest
from megatron_kd.models.load import load_hf_weights
from megatron_kd.models.parallel import ParallelGroups
from megatron_kd.models.router_mass import router_mass
from megatron_kd.status import has_begun

ROUTER_MASS = "router_mass.json"
logger = logging.getLogger(__name__)


def load_from_teacher(built: torch.nn.Module, recipe: Recipe, groups: ParallelGroups) -> None:
    """Fills a student with the parts of its teacher that ``student.from_teacher`` keeps. Collective over all ranks.

    Each rank reads the layers and experts that it has. Where experts are chosen by use, the teacher is built for a
    while beside the student, in the same layout.

    Raises:
        ConfigError: the recipe names no ``teacher.checkpoint``, or the calibration rows cannot be had.
        CheckpointError: it is missing, damaged, or of another model.
        DataError: there are no samples to measure the router on.
    """
    cut = recipe.student.from_teacher
    assert cut is not None, "the caller asks for it"
    teacher, student = recipe.teacher.model, recipe.student.model
    if recipe.teacher.checkpoint is None:
        raise ConfigError("student.from_teacher needs teacher.checkpoint: name what megatron-kd convert import wrote")
    path = Path(recipe.teacher.checkpoint)
    with fail_together(f"reading {path}"):
        check_same_architecture(path, read_note(path), teacher)
    check_checkpoint(path)
    layers = cut.layers(teacher.num_layers)
    experts = _experts(cut, recipe, groups, path)
    with fail_together(f"loading {path}"):
        whole = CheckpointWeights(path)
        kept = None if experts is None else [experts[layer] for layer in layers]
        load_hf_weights(built, student, CutWeights(whole, teacher, student, layers, kept), groups)


def _experts(cut: FromTeacherConfig, recipe: Recipe, groups: ParallelGroups, path: Path) -> list[list[int]] | None:
    """For each layer of the teacher the experts that are kept; None: all."""
    layers = recipe.teacher.model.num_layers
    if cut.keep_experts is not None:
        return [cut.keep_experts] * layers
    if cut.num_moe_experts is None:
        return None
    return [largest(mass, cut.num_moe_experts) for mass in _measured_mass(recipe, groups, path, cut)]


def _measured_mass(recipe: Recipe, groups: ParallelGroups, path: Path, cut: FromTeacherConfig) -> list[list[float]]:
    """The routers' probability of each layer and expert, measured once and kept in the run directory."""
    with fail_together("opening the calibration rows"):
        samples = open_samples(recipe.data.samples)
        ids = train_rows(samples, recipe.data.train_tokens)
        if cut.calibration_samples > len(ids):
            raise ConfigError(
                f"student.from_teacher.calibration_samples {cut.calibration_samples} is more than the {len(ids)} rows "
                f"to train on in {samples.path}: lower it, or prepare more rows"
            )
        measured = _what_is_measured(recipe, samples, path, cut)
    run_dir = Path(recipe.run_dir)
    kept = first_rank_tells(f"reading {run_dir / ROUTER_MASS}", lambda: _kept_mass(run_dir, measured))
    if kept is not None:
        return kept
    logger.info("measuring the router of %s on %d rows", recipe.teacher.model.name, cut.calibration_samples)
    batch = samples.rows(ids[: cut.calibration_samples])
    rows = torch.tensor(batch.tokens, dtype=torch.int64)
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    teacher = build_model(recipe.teacher.model, recipe.parallelism, groups, recipe.training.precision, trainable=False)
    load_weights(teacher, recipe.teacher.model, path)
    mass: list[list[float]] = router_mass(teacher, recipe.teacher.model, groups, rows, documents).tolist()
    with fail_together(f"writing {run_dir / ROUTER_MASS}"):
        # What a run in that folder was begun with is its own.
        if dist.get_rank() == 0 and not has_begun(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            write_json(run_dir / ROUTER_MASS, {**measured, "mass": mass})
    return mass


def _what_is_measured(recipe: Recipe, samples: SampleSet, path: Path, cut: FromTeacherConfig) -> dict[str, Any]:
    """What decides the mass; the layout does not."""
    return {
        "weights_sha256": read_note(path).get("weights_sha256"),
        "samples": samples.manifest["content"],
        "calibration_samples": cut.calibration_samples,
        "precision": recipe.training.precision,
    }


def _kept_mass(run_dir: Path, measured: dict[str, Any]) -> list[list[float]] | None:
    """What an earlier attempt of this run measured; None where there is none or of something else."""
    file = run_dir / ROUTER_MASS
    if not file.exists():
        return None
    try:
        kept: dict[str, Any] = json.loads(file.read_text())
        mass: list[list[float]] = kept.pop("mass")
    except (ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error}): remove it, and the router is measured again") from error
    return mass if kept == measured else None
