"""Run directories for the tests of comparisons, as training leaves them."""

from __future__ import annotations

import json
import math
from pathlib import Path

from megatron_kd.config import dump_recipe, load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENS_A_STEP = 480


def write_run(
    directory: Path,
    *overrides: str,
    recipe: str = "smollm2_cpu",
    kd: tuple[float, ...] = (8.0, 6.0, 5.0, 4.0),
    evaluations: tuple[tuple[int, float], ...] = ((0, 9.0), (2, 6.0), (4, 4.5)),
) -> Path:
    """A run directory with one step of 480 tokens for each value of ``kd``; step s takes 1 + s seconds."""
    (directory / "evaluations").mkdir(parents=True)
    (directory / "recipe.yaml").write_text(dump_recipe(load_recipe(REPOSITORY / f"recipes/{recipe}.yaml", overrides)))
    (directory / "environment.json").write_text('{"torch": "2.13", "git_revision": "0123abc"}')
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps(kd)))
    for row in evaluated(evaluations):
        (directory / "evaluations" / f"iter_{row['iteration']:07d}.json").write_text(json.dumps(row))
    return directory


def steps(kd: tuple[float, ...]) -> list[dict[str, float]]:
    """A line of metrics for each step."""
    return [
        {
            "iteration": step,
            "tokens": TOKENS_A_STEP * step,
            "samples": 2 * step,
            "loss/kd": value,
            "perf/step_time_s": 1.0 + step,
            "perf/tokens_per_s_per_gpu": 100.0 * step,
            "memory/peak_gib": 2.0 - 0.1 * step,
        }
        for step, value in enumerate(kd, start=1)
    ]


def evaluated(values: tuple[tuple[int, float], ...]) -> list[dict[str, float]]:
    """An evaluation for each (step, KD)."""
    return [
        {
            "iteration": step,
            "tokens": TOKENS_A_STEP * step,
            "eval/kd": value,
            "eval/perplexity": math.exp(value),
            "eval/top1_agreement": 0.1 * step,
            "eval/unigram_kd": 5.0,
        }
        for step, value in values
    ]
