"""docs/plan.md holds what the command prints and what the code assumes."""

from __future__ import annotations

import re

import pytest

from megatron_kd.config import load_recipe
from megatron_kd.planning import efficiency
from megatron_kd.planning.efficiency import GIB
from megatron_kd.planning.plan import plan_recipe
from megatron_kd.planning.published import published_markdown, rows
from megatron_kd.planning.published_recipes import eight_to_three, gpt_oss, implied_rows
from megatron_kd.planning.published_results import EIGHT_TO_THREE, GPT_OSS
from tests.assets import ROOT

TEXT = (ROOT / "docs/plan.md").read_text()


def test_the_tables_are_those_of_the_command() -> None:
    found = re.search(r"<!-- begin: megatron-kd plan --published -->\n(.*)\n<!-- end -->", TEXT, re.DOTALL)
    assert found is not None
    assert found.group(1) == published_markdown(), "run megatron-kd plan --published and put it into docs/plan.md"


def test_every_published_row_has_its_prediction() -> None:
    assert {row.row for row in rows()} == {1, 2, 3, 4, 7}
    differing = [row for row in rows() if row.ratio is not None and abs(row.ratio - 1) > 0.05]
    assert differing and all(row.why for row in differing)


def test_the_key_rows_lie_in_their_bands() -> None:
    """What was counted must be near; what rests on assumed efficiencies within a third."""
    by_name = {(run.mode, run.implementation): plan_recipe(eight_to_three(run)) for run in EIGHT_TO_THREE}
    for run in EIGHT_TO_THREE:
        plan = by_name[run.mode, run.implementation]
        tensors = (plan.memory.total - plan.memory.parts["reserve"]) / GIB
        assert run.peak_gb is not None
        assert tensors == pytest.approx(run.peak_gb, rel=0.05 if run.mode == "offline" else 0.25)
    offline = GPT_OSS[1]
    assert plan_recipe(gpt_oss(offline)).step.seconds == pytest.approx(offline.seconds, rel=0.33)
    for run in EIGHT_TO_THREE:
        seconds = by_name[run.mode, run.implementation].step.seconds
        assert seconds == pytest.approx(run.seconds, rel=0.33 if run.implementation == "fused" else 0.15)
    ranking = sorted(by_name, key=lambda name: -by_name[name].memory.total)
    assert ranking == [(run.mode, run.implementation) for run in EIGHT_TO_THREE]


def test_the_batches_are_implied() -> None:
    eight = [implied_rows(run, "llama32_3b", 8192) for run in EIGHT_TO_THREE]
    assert f"gives {min(eight):.1f} to {max(eight):.1f} rows" in TEXT
    online, offline = (implied_rows(run, "gpt_oss_20b", 32768) for run in GPT_OSS)
    assert f"{offline:.1f} rows on one node and {online:.1f} on four" in TEXT
    assert [gpt_oss(run).training.global_batch_size for run in GPT_OSS] == [128, 32]


def test_the_assumptions_are_those_of_the_code() -> None:
    for line in (
        f"| dense products | {efficiency.DENSE_GEMM} |",
        f"| grouped products of experts | {efficiency.GROUPED_GEMM} |",
        f"| head, in all losses | {efficiency.LOSS_GEMM} |",
        f"| flash attention, head size 64 / 128 | {efficiency.ATTENTION[64]} / {efficiency.ATTENTION[128]} |",
        f"| attention in a window | {efficiency.WINDOWED_ATTENTION:.2f} |",
        f"| memory bandwidth | {efficiency.MEMORY_BANDWIDTH:.2f} |",
        f"| links: rings / all-to-all | {efficiency.LINK:.2f} / {efficiency.ALL_TO_ALL:.2f} |",
        f"NVLink-C2C 225 GB/s a GPU) | {efficiency.HOST_LINK:.2f} |",
        f"{efficiency.CONTEXT_GIB} GiB context and workspaces, {efficiency.COMMUNICATOR_GIB} GiB a communicator",
        f"at most {100 * efficiency.USABLE:g} % of",
        f"taken {efficiency.MOE_KEPT_IMBALANCE} times the mean",
        f"activations, {efficiency.ELEMENTWISE_FORWARD} times in forward and {efficiency.ELEMENTWISE_BACKWARD:g} times",
    ):
        assert line in TEXT.replace("\n", " ") or line in TEXT, line


@pytest.mark.parametrize("name", ["smollm2_cpu", "smollm2_cpu_online"])
def test_the_demo_is_as_the_page_says(name: str) -> None:
    plan = plan_recipe(load_recipe(ROOT / f"recipes/{name}.yaml"))
    planned = rf"`recipes/{name}.yaml` \| {plan.memory.total / GIB:.1f} / [\d.]+ GiB \| {plan.step.seconds:.1f} / "
    assert re.search(planned, TEXT), planned
