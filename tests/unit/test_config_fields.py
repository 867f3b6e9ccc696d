"""Single values of a recipe, as scripts ask for them."""

from __future__ import annotations

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.config.fields import field_line, field_values
from megatron_kd.errors import ConfigError
from tests.assets import ROOT
from tests.e2e.road import one_error_line
from tests.warm import warm

DEMO = ROOT / "recipes/smollm2_cpu.yaml"
DEFAULTS = ["logging.wandb=null", "student.checkpoint=null"]


def test_values_as_the_recipe_has_them() -> None:
    names = ["cluster.nodes", "run_dir", "student.checkpoint", "logging.wandb.mode", "cluster", "data.shuffle"]
    values = field_values(load_recipe(DEMO, [*DEFAULTS, "run_dir=a b", "cluster.nodes=1"]), names)
    assert list(values) == names
    assert [field_line(name, value) for name, value in values.items()] == [
        "1",
        "a b",
        "",
        "",
        '{"nodes": 1, "gpus_per_node": 1, "gpu": "cpu"}',
        "true",
    ]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("cluster.node", "cluster.nodes"),
        ("rundir", "run_dir"),
        ("teacher.cach", "teacher.cache"),
        ("cluster.nodes.x", "cluster.nodes"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"--field {name}: .*did you mean {nearest}\\?"):
        field_values(load_recipe(DEMO), [name])


def test_a_line_break_would_make_two_lines() -> None:
    with pytest.raises(ConfigError, match="run_dir: 'a\\\\nb' has a line break"):
        field_line("run_dir", "a\nb")


def test_by_the_command() -> None:
    done = warm("show", DEMO, "run_dir=here", "--field", "run_dir", "--field", "cluster.gpu", "--field", "run_dir")
    assert (done.returncode, done.stdout) == (0, "here\ncpu\nhere\n")
    assert warm("show", DEMO, "--field", "cluster.nodes", "--json").stdout == '{\n  "cluster.nodes": 1\n}\n'
    one_error_line(warm("show", DEMO, "--field", "cluster.gpus"), "did you mean cluster.gpu")
    odd = ["cluster.gpus_per_node=3", "training.global_batch_size=2"]
    one_error_line(warm("show", DEMO, *odd, "--field", "run_dir"), "global_batch_size 2")
    assert warm("show", DEMO, *odd, "--for-capture", "--field", "cluster.nodes").stdout == "1\n"
