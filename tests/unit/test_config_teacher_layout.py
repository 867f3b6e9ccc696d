"""Rules of the teacher's own layout and its offload: what is refused, and what the student's layout is then free of."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.errors import ConfigError
from tests.assets import ROOT

ONLINE = ROOT / "recipes/smollm2_cpu_online.yaml"
OFFLINE = ROOT / "recipes/smollm2_cpu.yaml"
OWN = "teacher.parallelism."
FOUR = ["cluster.gpus_per_node=4", "training.global_batch_size=4"]
MOE = ["teacher.model=tiny_gpt_oss", "student.model=tiny_llama", "student.from_teacher=null", "data.seq_length=240"]
MOE += ["student.other_vocabulary=fold", "teacher.targets=top_k", *FOUR]


@pytest.mark.parametrize(
    ("recipe", "overrides", "words"),
    [
        (
            ONLINE,
            [*FOUR, f"{OWN}tensor_model_parallel_size=3"],
            ["world of 4 ranks", "tp·pp·cp = 3·1·1", "change cluster.gpus_per_node or teacher.parallelism.tensor"],
        ),
        (
            ONLINE,
            [*FOUR, f"{OWN}tensor_model_parallel_size=2"],
            ["teacher.parallelism.tensor_model_parallel_size 2 must divide teacher.model.num_attention_heads 9"],
        ),
        (
            ONLINE,
            [*FOUR, f"{OWN}pipeline_model_parallel_size=4"],
            ["teacher.parallelism.pipeline_model_parallel_size 4 must divide teacher.model.num_layers 30"],
        ),
        (
            ONLINE,
            [*FOUR, "data.seq_length=254", f"{OWN}context_parallel_size=2"],
            ["data.seq_length 254 must be a multiple of 2 × teacher.parallelism.context_parallel_size 2"],
        ),
        (
            ONLINE,
            [*FOUR, f"{OWN}expert_model_parallel_size=2"],
            ["teacher.parallelism.expert_model_parallel_size 2 shares experts", "teacher.model have none"],
        ),
        (
            ONLINE,
            [*MOE, f"{OWN}expert_model_parallel_size=3"],
            ["teacher.parallelism.expert_model_parallel_size 3 must divide teacher.model.num_moe_experts"],
        ),
        (
            ONLINE,
            [*FOUR, f"{OWN}expert_tensor_parallel_size=2"],
            ["teacher.parallelism.expert_tensor_parallel_size 2 is not available"],
        ),
        (
            ONLINE,
            [f"{OWN}sequence_parallel=true"],
            ["teacher.parallelism.sequence_parallel needs teacher.parallelism.tensor_model_parallel_size above 1"],
        ),
        (OFFLINE, ["teacher.offload=true"], ["offload is set", "remove teacher.offload, or set mode to online"]),
    ],
)
def test_refusals_name_the_teachers_own_keys(recipe: Path, overrides: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(recipe, overrides)
    for word in words:
        assert word in str(caught.value)


def test_each_layout_is_held_against_its_own_model() -> None:
    """Nothing of the teacher needs to divide by the student's sizes, nor the other way round."""
    student = ["student.from_teacher=null", "student.model=tiny_llama", "student.other_vocabulary=fold"]
    student += ["teacher.targets=top_k", "parallelism.tensor_model_parallel_size=2", "cluster.gpus_per_node=6"]
    student += ["training.global_batch_size=3", "data.seq_length=252"]
    with pytest.raises(ConfigError, match="num_attention_heads 9"):
        load_recipe(ONLINE, student)
    recipe = load_recipe(ONLINE, [*student, f"{OWN}tensor_model_parallel_size=3"])
    capture = recipe.in_teacher_layout()
    assert capture.parallelism.tensor_model_parallel_size == 3 and capture.teacher.parallelism is None
    assert load_recipe(ONLINE).in_teacher_layout() == load_recipe(ONLINE)
