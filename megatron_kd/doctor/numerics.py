"""The self-test of the losses as findings: one for each arithmetic and layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

from megatron_kd.doctor.check import Check, NoAnswerError, fail, in_words, ok, within
from megatron_kd.doctor.roll_call import Meeting
from megatron_kd.doctor.self_test import DTYPES, TOLERANCE, Differences, Layout, make_layouts, self_test

SELF_TEST_S = 120.0
"""All of it takes two seconds on a CPU; on a GPU the kernels are compiled first."""
_TODO = "do not train here: compare versions with docs/containers.md, unset NVIDIA_TF32_OVERRIDE, run pytest tests/gpu"
_STAGE = "self-test of the losses"


def check_losses(tp: int = 1, meeting: Meeting | None = None) -> list[Check]:
    """Runs the self-test, with a meeting in groups of ``tp`` of its ranks. Called by all of them together.

    Returns:
        On the first rank what all ranks found; on the others their own.
    """
    if meeting is None:
        return _within_time(lambda: _judge({"": _run([Layout()])}))
    together = meeting

    def all_ranks() -> dict[str, dict[str, list[Differences]]]:
        layouts = together.together(_STAGE, lambda: make_layouts(together.world, together.rank, tp))
        own = _run(layouts)
        together.tell("losses", {case: [asdict(each) for each in found] for case, found in own.items()})
        return {str(together.seats[together.rank]): own}

    checks = _within_time(lambda: _judge(all_ranks()))
    if meeting.rank or checks[0].name == "losses":
        return checks
    told = meeting.collect("losses", meeting.seats)
    silent = [str(seat) for rank, seat in meeting.seats.items() if rank not in told]
    if silent:
        return [fail("losses", f"no result from {', '.join(silent)}", "look at that rank's log")]
    return _judge(
        {
            str(meeting.seats[rank]): {case: [Differences(**each) for each in found] for case, found in cases.items()}
            for rank, cases in told.items()
        }
    )


def _run(layouts: Sequence[Layout]) -> dict[str, list[Differences]]:
    return {
        f"losses-{precision}" + ("" if layout.size == 1 else f" {layout}"): self_test(precision, layout)
        for precision in DTYPES
        for layout in layouts
    }


def _within_time(do: Callable[[], list[Check]]) -> list[Check]:
    try:
        return within(SELF_TEST_S, do)
    except NoAnswerError as error:
        return [fail("losses", str(error), "a rank hangs, or kernels compile for ever: look at the other lines")]
    except Exception as error:
        return [fail("losses", in_words(error), _TODO)]


def methods_in_words(found: Sequence[Differences]) -> str:
    """``eager: fused single_pass, recompute; dense``, and so on for each form of the passes."""
    forms: dict[str, dict[str, list[str]]] = {}
    for each in found:
        modes = forms.setdefault(each.form, {}).setdefault(each.implementation, [])
        if each.mode not in ("auto", *modes):
            modes.append(each.mode)
    return "; ".join(
        f"{form} " + ", ".join(f"{name} ({', '.join(modes)})" if modes else name for name, modes in methods.items())
        for form, methods in forms.items()
    )


def _judge(found: dict[str, dict[str, list[Differences]]]) -> list[Check]:
    """By case over all ranks: the case's worst method and rank decide."""
    first = next(iter(found.values()))
    return [_judge_case(case, {rank: cases[case] for rank, cases in found.items()}) for case in first]


def _judge_case(case: str, of_ranks: dict[str, list[Differences]]) -> Check:
    limit = next(limit for precision, limit in TOLERANCE.items() if case.startswith(f"losses-{precision}"))
    everything = [(rank, each) for rank, found in of_ranks.items() for each in found]
    wrong = [(rank, each) for rank, each in everything if not each.largest <= limit]
    if wrong:
        rank, worst = max(wrong, key=lambda pair: pair[1].largest)
        methods = methods_in_words([each for _, each in wrong])
        where = f" on {rank}" if rank else ""
        return fail(
            case,
            f"{methods} differ from dense float64: value by {worst.value:.1e}, gradient by {worst.gradient:.1e}{where} "
            f"({limit:g} allowed)",
            _TODO,
        )
    value = max(each.value for _, each in everything)
    gradient = max(each.gradient for _, each in everything)
    assert not math.isnan(value + gradient)
    return ok(
        case,
        f"{methods_in_words([each for _, each in everything])}: value within {value:.1e}, gradient within "
        f"{gradient:.1e} of dense float64 ({limit:g} allowed)",
    )
