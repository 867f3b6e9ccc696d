"""Phases: every moment belongs to one, and so does every peak."""

from __future__ import annotations

import time

import pytest
import torch

from megatron_kd.device import can_reset_peak_memory
from megatron_kd.training.phases import OUTSIDE, Phases

MIB = 2**20


def test_a_phase_within_another_interrupts_it() -> None:
    phases = Phases()
    phases.begin_step()
    seen = [phases.current]
    with phases("forward_backward"):
        seen.append(phases.current)
        time.sleep(0.02)
        for _ in range(2):
            with phases("teacher"):
                seen.append(phases.current)
                time.sleep(0.04)
        seen.append(phases.current)
    time.sleep(0.02)
    with phases("optimizer"):
        time.sleep(0.01)
    seen.append(phases.current)
    assert seen == [OUTSIDE, "forward_backward", "teacher", "teacher", "forward_backward", OUTSIDE]
    spent = phases.seconds()
    assert list(spent) == ["forward_backward", "teacher", "optimizer"]
    least = {"forward_backward": 0.02, "teacher": 0.08, "optimizer": 0.01}
    assert all(spent[name] >= seconds for name, seconds in least.items())
    phases.begin_step()
    assert phases.seconds() == {}


def test_an_error_leaves_the_phase() -> None:
    phases = Phases()
    with pytest.raises(ValueError, match="no"), phases("evaluation"):
        raise ValueError("no")
    assert phases.current == OUTSIDE


@pytest.mark.skipif(not can_reset_peak_memory(), reason="the peak of this process cannot be started anew")
def test_a_peak_belongs_to_the_phase_it_was_in() -> None:
    phases = Phases()
    phases.begin_memory()
    with phases("teacher"):
        torch.ones(200 * MIB, dtype=torch.uint8)
    with phases("optimizer"):
        torch.ones(20 * MIB, dtype=torch.uint8)
    peaks = phases.take_peaks(["teacher", "optimizer", "data"])
    assert set(peaks) == {"teacher", "optimizer"}
    assert 150 * MIB < peaks["teacher"] - peaks["optimizer"] < 250 * MIB
    assert phases.take_peaks(["teacher"]) == {}  # taken
