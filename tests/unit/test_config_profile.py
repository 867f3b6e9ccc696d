"""Which profiles a recipe may ask for."""

from __future__ import annotations

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.errors import ConfigError
from tests.assets import ROOT

RECIPE = ROOT / "recipes/smollm2_cpu.yaml"


def test_the_names_of_megatron_with_its_defaults() -> None:
    assert load_recipe(RECIPE, []).profile is None
    profile = load_recipe(RECIPE, ["profile.record_shapes=true"]).profile
    assert profile is not None
    assert (profile.step_start, profile.step_end, profile.ranks, profile.record_shapes) == (10, 12, [0], True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["profile.step_end=10"], r"profile\.step_end 10 must be more than profile\.step_start 10"),
        (
            ["profile.step_start=66", "profile.step_end=70"],
            r"profile\.step_start 66 must be less than .*train_iters 66",
        ),
        (["profile.ranks=[0,1]"], r"profile\.ranks has 1, but the cluster has the ranks 0 to 0"),
        (["profile.profiler=nsys"], r"'nsys' watches GPUs, cluster\.gpu is 'cpu'"),
        (["profile.step_strat=1"], r"step_start"),
    ],
)
def test_what_cannot_be_profiled(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe(RECIPE, overrides)
