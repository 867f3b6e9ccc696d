"""The engines on SmolLM2: transformers on its GGUF file, Megatron-Core on the checkpoint imported from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megatron_kd.testing import run_distributed
from tests.assets import ROOT, smollm2_checkpoint, tiny_recipe

ROWS, LENGTH, TOP_K = 3, 48, 100


def engines_rank(rank: int, world: int, recipe_path: Path) -> dict[str, Any]:
    """Scores a few rows with both engines."""
    from megatron_kd.config import load_recipe
    from megatron_kd.data.samples import open_samples
    from megatron_kd.models.launch import join_ranks
    from megatron_kd.teacher.drift import engine_drift
    from megatron_kd.teacher.engine import open_teacher
    from megatron_kd.teacher.score import score_rows
    from tests.training_runs import prepare_rows

    recipe = load_recipe(recipe_path)
    groups = join_ranks(recipe)
    prepare_rows(recipe, masked=False)
    samples = open_samples(recipe.data.samples)
    hf, megatron = open_teacher(load_recipe(recipe_path, ["teacher.engine=hf"]), groups), open_teacher(recipe, groups)
    rows = [score_rows(engine, samples, range(ROWS), np.float32) for engine in (hf, megatron)]
    drift = engine_drift(hf, megatron, samples, range(ROWS))
    return {"rows": rows, "drift": drift, "identities": [hf.identity(), megatron.identity()]}


@pytest.mark.slow
def test_smollm2_is_the_same_in_both_engines(tmp_path: Path) -> None:
    model = yaml.safe_load((ROOT / "configs/models/smollm2_135m.yaml").read_text())
    recipe = tiny_recipe(
        tmp_path,
        data={"seq_length": LENGTH, "train_tokens": ROWS * LENGTH, "heldout_tokens": None},
        teacher={"model": model, "checkpoint": str(smollm2_checkpoint()), "top_k": TOP_K},
        student={"from_teacher": {"keep_every": 3}},
        training={"global_batch_size": 1},
    )
    (found,) = run_distributed(engines_rank, 1, recipe, timeout_s=240.0)
    swapped = 0
    for ours, theirs in zip(*found["rows"], strict=True):
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, rtol=0, atol=2e-3)
        np.testing.assert_allclose(ours.tail_logmass, theirs.tail_logmass, rtol=0, atol=2e-3)
        # Ids change places only between values that tie within the same bound, or with the first that was not kept.
        unlike = ours.ids != theirs.ids
        gaps = np.abs(np.diff(theirs.logprobs, axis=1))
        near = np.pad(gaps, ((0, 0), (1, 0)), constant_values=np.inf) <= 2e-3
        near |= np.pad(gaps, ((0, 0), (0, 1)), constant_values=0.0) <= 2e-3
        assert near[unlike].all()
        swapped += int(unlike.sum())
    assert swapped <= 0.002 * ROWS * LENGTH * TOP_K
    drift = found["drift"]
    assert (drift.rows, drift.positions, drift.top1_agreement) == (ROWS, ROWS * LENGTH, 1.0)
    assert drift.logprob_max < 2e-3 and drift.kl_max < 1e-6
    assert drift.teachers_differ_in == "engine: 'hf', 'megatron'"
    hf, megatron = found["identities"]
    assert hf["weights_sha256"] == megatron["weights_sha256"], "one file, however it is read"
    assert (hf["engine"], megatron["engine"]) == ("hf", "megatron")
    assert {key: megatron["architecture"][key] for key in hf["architecture"]} == hf["architecture"]
