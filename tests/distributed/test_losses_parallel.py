"""Tensor and sequence parallelism over gloo against the single-process oracle, in float64."""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist

from megatron_kd.losses import IMPLEMENTATIONS, linear_topk_divergence
from megatron_kd.targets import TopKTargets
from megatron_kd.testing import run_distributed
from tests.unit.test_losses_oracle import ALL_METHODS, Case, make_case, oracle_run, tiles

# Name → (vocabulary, K, rows of each rank's shard by world size); the last rows are padding.
LAYOUTS: dict[str, tuple[int, int, dict[int, list[int]]]] = {
    "even": (24, 4, {1: [24], 2: [12, 12], 3: [8, 8, 8], 4: [6, 6, 6, 6]}),
    "uneven and padded": (22, 5, {1: [26], 2: [15, 10], 3: [9, 4, 12], 4: [7, 5, 8, 6]}),
    "K larger than a shard": (20, 9, {1: [20], 2: [8, 12], 3: [7, 7, 7], 4: [5, 5, 5, 5]}),
    "the last shard is padding alone": (6, 3, {1: [8], 2: [6, 2], 3: [3, 3, 3], 4: [2, 2, 2, 2]}),
}


# Each divergence with cached targets and, where no tail is named, with a full-vocabulary teacher too.
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 1.7, "ce_weight": 0.3, "logit_softcap": 2.0},
    {"temperature": 1.0, "tail": "bucket"},
    {"temperature": 3.0, "ce_weight": 0.3, "tail": "renormalize_both"},
    {"temperature": 1.7, "divergence": "reverse_kl", "ce_weight": 0.3},
    {"temperature": 1.0, "divergence": "reverse_kl", "tail": "renormalize_both"},
    {"temperature": 1.7, "divergence": "jsd", "beta": 0.3},
    {"temperature": 1.0, "divergence": "jsd", "tail": "renormalize_teacher", "ce_weight": 0.3},
    {"temperature": 1.7, "divergence": "tvd", "logit_softcap": 2.0},
    {"temperature": 1.0, "divergence": "tvd", "tail": "renormalize_both"},
    {"temperature": 1.7, "divergence": "tvd", "tail": "renormalize_teacher"},
    {"temperature": 1.7, "divergence": "jsd", "tail": "renormalize_both"},
    {"temperature": 1.0, "tail": "renormalize_teacher"},
    {"temperature": 1.7, "tail": "truncate", "ce_weight": 0.3},
]


def case_of(layout: str, world: int, temperature: float, masked: tuple[int, ...], one_shard: bool) -> tuple[Case, int]:
    vocab, top_k, shards = LAYOUTS[layout]
    rows = shards[world]
    case = make_case(12, 5, vocab, top_k, temperature, padding=sum(rows) - vocab, masked=masked)
    if one_shard:  # every cached id in the first shard
        t, first = case.targets, min(rows[0], vocab)
        ids = torch.arange(top_k, dtype=torch.int32).expand(12, top_k) % first
        case = replace(case, targets=TopKTargets(ids.contiguous(), t.logprobs, t.tail_logmass, temperature))
    return case, sum(rows[: dist.get_rank()])


def check(rank: int, world: int, layout: str, masked: tuple[int, ...], one_shard: bool, variants: Any) -> list[float]:
    """Compares every method with the oracle; returns the losses seen."""
    group: Any = dist.group.WORLD
    losses: list[float] = []
    for sequence_parallel in (False, True):
        if sequence_parallel and 12 % world:
            continue
        for options in variants:
            kw = dict(options)
            case, start = case_of(layout, world, kw.pop("temperature"), masked, one_shard)
            stop = start + LAYOUTS[layout][2][world][rank]
            mine = slice(rank * 12 // world, (rank + 1) * 12 // world) if sequence_parallel else slice(None)
            for kind in ("topk", "full") if "tail" not in kw else ("topk",):
                loss, per_token, dh, dw = oracle_run(case, kind, upstream=0.5, **kw)
                for name, mode in ALL_METHODS:
                    # [b, s] seen as [s, b]: a view that no rank may flatten carelessly.
                    hidden = case.hidden[mine].clone().requires_grad_()
                    shaped = hidden.view(2, -1, 5).transpose(0, 1) if not sequence_parallel else hidden
                    weight = case.weight[start:stop].clone().requires_grad_()
                    order = torch.arange(12).view(2, 6).t().reshape(-1) if not sequence_parallel else torch.arange(12)
                    t = case.targets
                    targets = TopKTargets(t.ids[order], t.logprobs[order], t.tail_logmass[order], t.temperature)
                    call: dict[str, Any] = {
                        "vocab_size": case.vocab_size,
                        "vocab_start": start,
                        "group": group,
                        "mode": mode,
                        "sequence_parallel": sequence_parallel,
                        "chunk_bytes": 5 * 8 * case.vocab_size // world,
                    } | kw  # fmt: skip
                    if mode == "tiles":
                        call["mode"] = "recompute"
                    if "ce_weight" in kw:
                        call["labels"] = case.labels[order]
                    weights = case.token_weights[order]
                    with tiles() if mode == "tiles" else nullcontext():
                        if kind == "topk":
                            out = IMPLEMENTATIONS[name].topk(shaped, weight, targets, weights, **call)
                        else:
                            teacher = case.teacher_hidden[mine]
                            teacher = teacher.view(2, -1, 7).transpose(0, 1) if not sequence_parallel else teacher
                            out = IMPLEMENTATIONS[name].full(
                                shaped, weight, teacher, case.teacher_weight[start:stop], weights,
                                temperature=t.temperature, **call,
                            )  # fmt: skip
                    (0.5 * out.loss).backward()
                    where = f"{name}/{mode}/{kind}/SP {sequence_parallel}/{kw}"
                    for what, got, expected in (
                        ("loss", out.loss.detach(), loss),
                        ("loss_per_token", out.loss_per_token, per_token[order]),
                        ("dH", hidden.grad, dh[mine]),
                        ("dW", weight.grad, dw[start:stop]),
                    ):
                        assert got is not None
                        close = torch.allclose(got, expected, rtol=1e-10, atol=1e-11)
                        assert close, f"{what} of {where}: {got} but expected {expected}"
                    if kind == "topk":
                        check_statistics(out.statistics, case, order, where)
                    losses.append(float(out.loss.detach()))
    return losses


def check_statistics(statistics: Any, case: Case, order: torch.Tensor, where: str) -> None:
    """Equal to the dense statistics of one process, which the unit tests hold against their definition."""
    one = IMPLEMENTATIONS["dense"].topk(
        case.hidden[order],
        case.weight,
        TopKTargets(case.targets.ids[order], case.targets.logprobs[order], case.targets.tail_logmass[order], 1.0),
        case.token_weights[order],
        vocab_size=case.vocab_size,
    )
    torch.testing.assert_close(statistics.teacher_mass, one.statistics.teacher_mass, msg=where)
    if case.targets.temperature == 1.0:
        torch.testing.assert_close(statistics.student_mass, one.statistics.student_mass, msg=where)
    torch.testing.assert_close(statistics.top1_agreement, one.statistics.top1_agreement, msg=where)


EXPECTED_TRAFFIC = {
    "reverse_kl _allgather_base_ False": 3,
    "reverse_kl allreduce_ False": 3 + 1,
    "reverse_kl _allgather_base_ True": 3 + 3,
    "reverse_kl _reduce_scatter_base_ True": 3,
    "reverse_kl allreduce_ True": 1,
    "jsd _allgather_base_ False": 2 * 3,
    "jsd allreduce_ False": 3 + 1,
    "jsd _allgather_base_ True": 3 + 2 * 3,
    "jsd _reduce_scatter_base_ True": 3,
    "jsd allreduce_ True": 1,
}

ALL, SOME = tuple(VARIANTS), (VARIANTS[0], VARIANTS[5])

# Layout, masked tokens, whether all cached ids lie in the first shard, and the variants. Under sequence parallelism the
# masks leave slices with unequal numbers of valid rows, a slice without any, and no valid row at all.
PLANS: dict[int, list[tuple[str, tuple[int, ...], bool, tuple[dict[str, Any], ...]]]] = {
    2: [
        ("uneven and padded", (0, 1, 2, 8), False, ALL),
        *((layout, (), False, SOME) for layout in LAYOUTS),
        ("even", (3,), True, SOME),
    ],
    3: [("K larger than a shard", tuple(range(5)), False, SOME)],
    4: [
        ("uneven and padded", tuple(range(5)), False, ALL),
        ("uneven and padded", tuple(range(12)), False, SOME),
        ("the last shard is padding alone", (), False, SOME),
    ],
}


def every_layout(rank: int, world: int, plan: int) -> tuple[list[float], dict[str, int]]:
    losses = check(rank, world, *PLANS[world][plan])
    return losses, traffic(rank) if (world, plan) == (2, 0) else {}


def traffic(rank: int) -> dict[str, int]:
    """Collectives of one fused call and its backward pass, counted in the profiler's events (two ranks)."""
    case = make_case(12, 5, 24, 4)
    counts: dict[str, int] = {}
    for divergence, sequence_parallel in itertools.product(("reverse_kl", "jsd"), (False, True)):
        mine = slice(rank * 6, rank * 6 + 6) if sequence_parallel else slice(None)
        hidden = case.hidden[mine].clone().requires_grad_()
        weight = case.weight[rank * 12 : rank * 12 + 12].clone().requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            IMPLEMENTATIONS["fused"].topk(
                hidden, weight, case.targets, case.token_weights, vocab_size=24, vocab_start=rank * 12,
                group=dist.group.WORLD, sequence_parallel=sequence_parallel, divergence=divergence,
                chunk_bytes=2 * 4 * 12 * 8,
            ).loss.backward()  # fmt: skip
        for event in profile.events():
            for kind in ("_allgather_base_", "allreduce_", "_reduce_scatter_base_"):
                if event.name == f"c10d::{kind}":
                    key = f"{divergence} {kind} {sequence_parallel}"
                    counts[key] = counts.get(key, 0) + 1
    return counts


@pytest.mark.parametrize(("world", "plan"), [(world, plan) for world in PLANS for plan in range(len(PLANS[world]))])
def test_any_layout_equals_the_oracle(world: int, plan: int) -> None:
    results = run_distributed(every_layout, world, plan)
    # Two layouts of the sequence, topk in all variants, full in those without a tail.
    variants = PLANS[world][plan][3]
    calls = len(variants) + sum("tail" not in variant for variant in variants)
    assert len(results[0][0]) == 2 * calls * len(ALL_METHODS)
    # Not a rounding apart: ranks that decide by the loss (a skipped step) must decide alike.
    assert all(losses == results[0][0] for losses, _ in results)
    for _, counts in results if (world, plan) == (2, 0) else ():
        # Three chunks: an exchange each (two for jsd), dH reduced once each, the per-token loss summed at the end.
        assert counts == EXPECTED_TRAFFIC


def compiled_step(rank: int, world: int) -> float:
    """A compiled step without a graph break, against the eager one."""
    # Ranks inherit the environment of a pytest process in which the compiler may be turned off.
    os.environ.pop("TORCHDYNAMO_DISABLE", None)
    torch._dynamo.config.disable = False
    case = make_case(12, 5, 24, 4)
    half = slice(rank * 12, rank * 12 + 12)

    def step(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_topk_divergence(
            hidden * 2, weight, case.targets, case.token_weights, vocab_size=24, vocab_start=half.start,
            group=dist.group.WORLD, divergence="jsd", chunk_bytes=2 * 4 * 12 * 8,
        ).loss  # fmt: skip

    found = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        hidden, weight = case.hidden.clone().requires_grad_(), case.weight[half].clone().requires_grad_()
        loss = run(hidden, weight)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    torch.testing.assert_close(found[1], found[0])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    return float(found[0][0])


def test_a_compiled_step_on_two_ranks() -> None:
    losses = run_distributed(compiled_step, 2)
    assert losses[0] == losses[1] > 0


def gpt_oss_vocabulary(rank: int, world: int) -> list[float]:
    """201,088 ids over four shards, padded to a multiple of 128 a shard, against the oracle."""
    vocab, shard = 201_088, 50_304
    case = make_case(tokens=6, size=4, vocab=vocab, top_k=24, temperature=1.7, padding=world * shard - vocab)
    for start in range(0, world * shard, shard):
        assert ((case.targets.ids >= start) & (case.targets.ids < start + shard)).any()
    mine = slice(rank * shard, (rank + 1) * shard)
    losses = []
    for divergence in ("forward_kl", "jsd"):
        loss, _, dh, dw = oracle_run(case, divergence=divergence)
        for mode in ("single_pass", "recompute", "tiles"):
            hidden, weight = case.hidden.clone().requires_grad_(), case.weight[mine].clone().requires_grad_()
            with tiles() if mode == "tiles" else nullcontext():
                out = linear_topk_divergence(
                    hidden, weight, case.targets, case.token_weights, vocab_size=vocab, vocab_start=mine.start,
                    group=dist.group.WORLD, divergence=divergence, chunk_bytes=4 << 20,
                    mode="recompute" if mode == "tiles" else mode,
                )  # fmt: skip
            out.loss.backward()
            torch.testing.assert_close(out.loss.detach(), loss)
            torch.testing.assert_close(hidden.grad, dh)
            torch.testing.assert_close(weight.grad, dw[mine])
            losses.append(float(out.loss.detach()))
    return losses


def test_gradients_at_the_vocabulary_of_gpt_oss() -> None:
    results = run_distributed(gpt_oss_vocabulary, 4)
    assert len(results[0]) == 6 and all(losses == results[0] for losses in results)
