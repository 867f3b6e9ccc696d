"""The independent oracle of the loss tests: textbook formulas, float64, autograd, one row after another.

Nothing here is shared with the package. The tests of this file hold the oracle against torch's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from megatron_kd.losses import IMPLEMENTATIONS, DivergenceOutput, geometry, sizes
from megatron_kd.targets import TopKTargets

METHODS = [
    ("dense", "auto"),
    ("forward_chunked", "auto"),
    ("fused", "single_pass"),
    ("fused", "recompute"),
]
# What ``run_case`` knows beside these: the tiles of very long contexts, at any length.
TILES = ("fused", "tiles")
ALL_METHODS = [*METHODS, TILES]

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd", "tvd")
# Which tail goes with which divergence, by the definitions.
COMBINATIONS = [
    (divergence, tail)
    for divergence in DIVERGENCES
    for tail in ("bucket", "renormalize_teacher", "renormalize_both", "truncate")
    if not (tail == "truncate" and divergence != "forward_kl")
    and not (tail == "renormalize_teacher" and divergence == "reverse_kl")
]


@dataclass(frozen=True)
class Case:
    """A student (hidden [N, D], weight [V + padding, D]), a teacher and what else a call takes."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    targets: TopKTargets
    token_weights: Tensor
    labels: Tensor
    vocab_size: int


def make_case(
    tokens: int = 7,
    size: int = 5,
    vocab: int = 24,
    top_k: int = 4,
    temperature: float = 1.0,
    padding: int = 3,
    seed: int = 0,
    masked: tuple[int, ...] = (),
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Cached targets are the exact top-K of the teacher's distribution at ``temperature``."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    hidden, weight = normal(tokens, size), normal(vocab + padding, size)
    teacher_hidden, teacher_weight = normal(tokens, size + 2), normal(vocab + padding, size + 2)
    logp = torch.log_softmax(teacher_hidden @ teacher_weight[:vocab].t() / temperature, dim=1)
    best = logp.topk(top_k, dim=1)
    rest = logp.scatter(1, best.indices, -torch.inf).exp().sum(dim=1).log()
    token_weights = torch.rand(tokens, generator=rng, dtype=torch.float64) + 0.5
    token_weights[list(masked)] = 0.0
    labels = torch.randint(0, vocab, (tokens,), generator=rng)
    labels[1:2] = -100
    return Case(
        hidden.to(dtype),
        weight.to(dtype),
        teacher_hidden.to(dtype),
        teacher_weight.to(dtype),
        TopKTargets(best.indices.to(torch.int32), best.values, rest, temperature),
        token_weights,
        labels,
        vocab,
    )


def student_logits(hidden: Tensor, weight: Tensor, vocab: int, softcap: float | None) -> Tensor:
    y = hidden.double() @ weight.double()[:vocab].t()
    return y if softcap is None else softcap * (y / softcap).tanh()


def hard_label_loss(y: Tensor, label: int) -> Tensor:
    return y.new_zeros(()) if label == -100 else cross_entropy(y[None], torch.tensor([label]))


def oracle_divergence(p: Tensor, log_q: Tensor, divergence: str, beta: float) -> Tensor:
    """Σ over outcomes of the textbook terms; p [m] without graph, log q [m] with it, finite."""
    q, positive = log_q.exp(), p > 0
    log_p = torch.where(positive, p, 1.0).log()
    if divergence == "forward_kl":
        return (p * (log_p - log_q))[positive].sum()
    if divergence == "reverse_kl":
        return (q * (log_q - torch.where(positive, log_p, -100.0))).sum()
    if divergence == "tvd":
        return 0.5 * (q - p).abs().sum()
    m = beta * p + (1 - beta) * q
    return beta * (p * (log_p - m.log()))[positive].sum() + (1 - beta) * (q * (log_q - m.log())).sum()


def oracle_row(
    z: Tensor, ids: list[int], logprobs: list[float], tail_logmass: float, tail: str,
    divergence: str = "forward_kl", beta: float = 0.5,
) -> Tensor:  # fmt: skip
    """One row: z [V] scaled logits, by a dictionary of the probabilities and, unless it is left out, the bucket."""
    p: dict[int, float] = {}
    for i, logprob in zip(ids, logprobs, strict=True):
        if i >= 0:
            p[i] = p.get(i, 0.0) + math.exp(logprob)
    outside = [j for j in range(z.numel()) if j not in p]
    mass = sum(p.values()) if tail.startswith("renormalize") else 1.0
    teacher = [v / mass for v in p.values()]
    if tail == "renormalize_both":
        log_q = torch.log_softmax(z[list(p)], dim=0)
    else:
        whole = torch.log_softmax(z, dim=0)
        log_q = whole[list(p)]
        if tail != "truncate" and outside:
            teacher.append(math.exp(tail_logmass) if tail == "bucket" else 0.0)
            log_q = torch.cat([log_q, torch.logsumexp(whole[outside], dim=0)[None]])
    return oracle_divergence(torch.tensor(teacher, dtype=z.dtype), log_q, divergence, beta)


def oracle_topk(
    case: Case, hidden: Tensor, weight: Tensor, *, tail: str = "bucket", ce_weight: float = 0.0,
    logit_softcap: float | None = None, scale_by_t2: bool = True, divergence: str = "forward_kl", beta: float = 0.5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(Σ w·l with a graph, l [N] with 0 where the weight is 0)."""
    t = case.targets.temperature
    y = student_logits(hidden, weight, case.vocab_size, logit_softcap)
    rows = []
    for n in range(hidden.shape[0]):
        if case.token_weights[n] == 0:
            rows.append(y.new_zeros(()))
            continue
        kd = oracle_row(
            y[n] / t, case.targets.ids[n].tolist(), case.targets.logprobs[n].double().tolist(),
            float(case.targets.tail_logmass[n]), tail, divergence, beta,
        )  # fmt: skip
        kd = kd * t**2 if scale_by_t2 else kd
        rows.append((1 - ce_weight) * kd + (ce_weight * hard_label_loss(y[n], int(case.labels[n])) if ce_weight else 0))
    per_token = torch.stack(rows) if rows else y.sum() + y.new_zeros(0)
    return (per_token * case.token_weights.double()).sum() + 0 * (y.sum() if y.numel() else weight.sum() * 0), per_token


def oracle_full(
    case: Case, hidden: Tensor, weight: Tensor, temperature: float, *, ce_weight: float = 0.0,
    logit_softcap: float | None = None, divergence: str = "forward_kl", beta: float = 0.5,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same for a full-vocabulary teacher."""
    y = student_logits(hidden, weight, case.vocab_size, logit_softcap)
    u = student_logits(case.teacher_hidden, case.teacher_weight, case.vocab_size, None)
    p, log_q = torch.softmax(u / temperature, dim=1), torch.log_softmax(y / temperature, dim=1)
    rows = [oracle_divergence(p[n], log_q[n], divergence, beta) for n in range(y.shape[0])]
    kd = temperature**2 * (torch.stack(rows) if rows else y.sum(dim=1))
    ce = cross_entropy(y, case.labels, reduction="none", ignore_index=-100)
    per_token = torch.where(case.token_weights != 0, (1 - ce_weight) * kd + ce_weight * ce, 0.0)
    return (per_token * case.token_weights.double()).sum(), per_token


@contextmanager
def tiles() -> Iterator[None]:
    """Within it, modes without a gradient in forward cut the vocabulary too, down to a single column."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "LONG_CONTEXT_ROWS", 0)
        patch.setattr(sizes, "_ROW_MULTIPLE", 1)
        yield


@dataclass(frozen=True)
class Run:
    """A call and its backward pass: output and both gradients."""

    output: DivergenceOutput
    hidden_gradient: Tensor
    weight_gradient: Tensor


def run_case(
    case: Case, name: str, mode: str, kind: str = "topk", upstream: float = 1.0, rows: int = 3,
    autocast: bool = False, **kw: Any,
) -> Run:  # fmt: skip
    """Calls an implementation with chunks of ``rows`` rows (under autocast if asked), then goes backward."""
    hidden, weight = case.hidden.detach().clone(), case.weight.detach().clone()
    hidden.requires_grad_()
    weight.requires_grad_()
    buffers = 1 + (kind == "full") + (kw.get("logit_softcap") is not None)
    itemsize = 8 if torch.float64 in (hidden.dtype, weight.dtype) else 4
    sizes: dict[str, Any] = {
        "vocab_size": case.vocab_size,
        "mode": mode,
        "chunk_bytes": rows * case.vocab_size * itemsize * buffers,
    }
    kw = sizes | kw
    if kw.get("ce_weight"):
        kw["labels"] = case.labels
    if mode == "tiles":
        kw["mode"] = "recompute"
    cut = tiles() if mode == "tiles" else nullcontext()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast), cut:
        if kind == "topk":
            out = IMPLEMENTATIONS[name].topk(hidden, weight, case.targets, case.token_weights, **kw)
        else:
            out = IMPLEMENTATIONS[name].full(
                hidden, weight, case.teacher_hidden, case.teacher_weight, case.token_weights,
                temperature=case.targets.temperature, **kw,
            )  # fmt: skip
    (out.loss * upstream).backward()
    assert hidden.grad is not None and weight.grad is not None
    return Run(out, hidden.grad, weight.grad)


def oracle_run(
    case: Case, kind: str = "topk", upstream: float = 1.0, **kw: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, l [N], dH, dW) in float64."""
    hidden, weight = case.hidden.detach().double().requires_grad_(), case.weight.detach().double().requires_grad_()
    if kind == "topk":
        loss, per_token = oracle_topk(case, hidden, weight, **kw)
    else:
        loss, per_token = oracle_full(case, hidden, weight, case.targets.temperature, **kw)
    (loss * upstream).backward()
    assert hidden.grad is not None and weight.grad is not None
    return loss.detach(), per_token.detach(), hidden.grad, weight.grad


def assert_agrees(run: Run, expected: tuple[Tensor, Tensor, Tensor, Tensor], atol: float = 1e-11) -> None:
    got = (run.output.loss, run.output.loss_per_token, run.hidden_gradient, run.weight_gradient)
    for what, a, b in zip(("loss", "loss_per_token", "dH", "dW"), got, expected, strict=True):
        a = a.detach().double()
        assert a.shape == b.shape and torch.allclose(a, b, rtol=atol, atol=atol), f"{what}: {a} but expected {b}"


def with_targets(case: Case, ids: Tensor, logprobs: Tensor, tail_logmass: Tensor) -> Case:
    return replace(case, targets=TopKTargets(ids, logprobs, tail_logmass, case.targets.temperature))


def test_oracle_is_torchs_kl_div() -> None:
    """Both directions, and JSD as two KL divergences to the mixture, by torch's function."""
    case = make_case(temperature=1.7)
    u = student_logits(case.teacher_hidden, case.teacher_weight, 24, None) / 1.7
    z = student_logits(case.hidden, case.weight, 24, None) / 1.7
    log_p, log_q = torch.log_softmax(u, dim=1), torch.log_softmax(z, dim=1)

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return kl_div(b, a, log_target=True, reduction="none").sum(dim=1)

    log_m = (0.3 * log_p.exp() + 0.7 * log_q.exp()).log()
    expected = {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": kl(log_q, log_p),
        "jsd": 0.3 * kl(log_p, log_m) + 0.7 * kl(log_q, log_m),
        "tvd": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=1),
    }
    for divergence, per_token in expected.items():
        _, got, _, _ = oracle_run(case, "full", divergence=divergence, beta=0.3)
        torch.testing.assert_close(got, 1.7**2 * per_token, msg=divergence)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_oracle_with_every_id_cached_is_the_full_divergence(divergence: str) -> None:
    case = make_case(top_k=24, temperature=1.7)
    loss, per_token, _, _ = oracle_run(case, divergence=divergence)
    full, full_per_token, _, _ = oracle_run(case, "full", divergence=divergence)
    torch.testing.assert_close(per_token, full_per_token)
    torch.testing.assert_close(loss, full)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_oracle_bucket_is_below_the_full_divergence(divergence: str) -> None:
    case = make_case(top_k=4)
    _, bucket, _, _ = oracle_run(case, divergence=divergence)
    _, full, _, _ = oracle_run(case, "full", divergence=divergence)
    assert (bucket > 0).all() and (bucket < full + 1e-15).all() and (bucket < full).any()
