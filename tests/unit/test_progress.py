"""The progress bar, off a terminal: lines on standard error, never on standard output."""

from __future__ import annotations

import pytest

from megatron_kd import progress as module
from megatron_kd.progress import progress


def test_disabled_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 3, enabled=False) as advance:
        advance(3, "note")
    assert capsys.readouterr() == ("", "")


def test_the_last_unit_prints_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("work", 3, unit="rows") as advance:
        advance()
        advance(2, "loss 1.5")
    output, error = capsys.readouterr()
    assert output == "" and error.splitlines() == ["work: 3/3 rows · 0 s, 0 s left · loss 1.5"]


def test_a_line_every_ten_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with progress("work", 100, unit="steps") as advance:
        for _ in range(25):
            now += 1.0
            advance()
    assert capsys.readouterr().err.splitlines() == [
        "work: 10/100 steps · 10 s, 90 s left",
        "work: 20/100 steps · 20 s, 80 s left",
    ]


def test_long_work_is_told_in_long_units(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    with progress("work", 40_000_000, unit="rows") as advance:
        for later in (600.0, 10_200.0):
            now += later
            advance(1_234_567)
    assert capsys.readouterr().err.splitlines() == [
        "work: 1234567/40000000 rows · 10 min, 5.2 h left",
        "work: 2469134/40000000 rows · 3.0 h, 45.6 h left",
    ]


def test_an_error_inside_comes_out() -> None:
    with pytest.raises(KeyError, match="inside"), progress("work", 3):
        raise KeyError("inside")
