"""Doctor: the self-test of the losses finds what is wrong with them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_kd.doctor import self_test as room
from megatron_kd.doctor.numerics import check_losses
from megatron_kd.doctor.self_test import DTYPES, MODES, TOLERANCE, Layout, self_test
from megatron_kd.losses import IMPLEMENTATIONS, Implementation, passes


@pytest.mark.parametrize("precision", DTYPES)
def test_every_mode_agrees_far_within_the_tolerance(precision: str) -> None:
    found = self_test(precision, Layout())
    assert [each.mode for each in found if each.implementation == "fused"] == list(MODES)
    assert {each.implementation for each in found} == set(IMPLEMENTATIONS)
    assert max(each.largest for each in found) < TOLERANCE[precision] / 3
    trained = [each for each in found if each.mode != "no_grad"]
    assert all(each.gradient > 0 for each in trained)


class _Wrong:
    """The fused loss with something wrong in its value or its gradient."""

    def __init__(self, of_value: float, of_gradient: float) -> None:
        self.of_value, self.of_gradient = of_value, of_gradient

    def __call__(self, hidden: Any, weight: Any, *rest: Any, **options: Any) -> Any:
        scaled = weight * self.of_gradient + (weight * (1 - self.of_gradient)).detach()
        out = IMPLEMENTATIONS["forward_chunked"].topk(hidden, scaled, *rest, **options)
        return replace(out, loss=out.loss + self.of_value)


@pytest.mark.parametrize(("value", "gradient"), [(1e-2, 1.0), (0.0, 1.001), (math.nan, 1.0)])
def test_a_wrong_loss_is_found(value: float, gradient: float, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Implementation(_Wrong(value, gradient), IMPLEMENTATIONS["fused"].full)  # type: ignore[arg-type]
    monkeypatch.setattr(room, "IMPLEMENTATIONS", IMPLEMENTATIONS | {"fused": wrong})
    checks = {check.name: check for check in check_losses()}
    assert checks["losses-fp32"].status == "fail"
    assert "fused (single_pass" in checks["losses-fp32"].found and "dense," not in checks["losses-fp32"].found


def test_what_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no kernel image is available for execution on the device")

    wrong = Implementation(broken, broken)  # type: ignore[arg-type]
    monkeypatch.setattr(room, "IMPLEMENTATIONS", IMPLEMENTATIONS | {"fused": wrong})
    [check] = check_losses()
    assert check.status == "fail" and "no kernel image" in check.found and check.todo


def test_the_eager_passes_are_taken_where_asked() -> None:
    gpu = torch.device("cuda")
    before = passes.passes_for
    assert passes.passes_for(gpu).name == "triton"
    with room.form_of_passes("eager"):
        assert passes.passes_for(gpu).name == "eager"
    assert passes.passes_for is before
