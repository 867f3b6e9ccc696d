"""The independent oracle of the loss tests: textbook formulas, float64, autograd, one row after another.

Nothing here is shared with the package. The tests of this file hold the oracle against torch's own functions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from megatron_kd.losses import IMPLEMENTATIONS, DivergenceOutput
from megatron_kd.targets import TopKTargets

METHODS = [
    ("dense", "auto"),
    ("forward_chunked", "auto"),
    ("fused", "single_pass"),
    ("fused", "recompute"),
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


def oracle_row(z: Tensor, ids: list[int], logprobs: list[float], tail_logmass: float, tail: str) -> Tensor:
    """One row of forward KL: z [V] scaled logits, by dictionaries of the probabilities."""
    p: dict[int, float] = {}
    for i, logprob in zip(ids, logprobs, strict=True):
        if i >= 0:
            p[i] = p.get(i, 0.0) + math.exp(logprob)
    p_tail = math.exp(tail_logmass) if tail == "bucket" else 0.0
    outside = [j for j in range(z.numel()) if j not in p]
    log_q = dict(enumerate(torch.log_softmax(z, dim=0)))
    if tail == "renormalize_both":
        log_q = dict(zip(p, torch.log_softmax(z[list(p)], dim=0), strict=True))
    if tail.startswith("renormalize"):
        p = {i: v / sum(p.values()) for i, v in p.items()}
    loss = z.new_zeros(())
    for i, v in p.items():
        if v > 0:
            loss = loss + v * (math.log(v) - log_q[i])
    if p_tail > 0 and outside:
        loss = loss + p_tail * (math.log(p_tail) - torch.logsumexp(torch.stack([log_q[j] for j in outside]), dim=0))
    return loss


def oracle_topk(
    case: Case, hidden: Tensor, weight: Tensor, *, tail: str = "bucket", ce_weight: float = 0.0,
    logit_softcap: float | None = None, scale_by_t2: bool = True,
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
            float(case.targets.tail_logmass[n]), tail,
        )  # fmt: skip
        kd = kd * t**2 if scale_by_t2 else kd
        rows.append((1 - ce_weight) * kd + (ce_weight * hard_label_loss(y[n], int(case.labels[n])) if ce_weight else 0))
    per_token = torch.stack(rows) if rows else y.sum() + y.new_zeros(0)
    return (per_token * case.token_weights.double()).sum() + 0 * (y.sum() if y.numel() else weight.sum() * 0), per_token


def oracle_full(
    case: Case, hidden: Tensor, weight: Tensor, temperature: float, *, ce_weight: float = 0.0,
    logit_softcap: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same for a full-vocabulary teacher."""
    y = student_logits(hidden, weight, case.vocab_size, logit_softcap)
    u = student_logits(case.teacher_hidden, case.teacher_weight, case.vocab_size, None)
    log_p, log_q = torch.log_softmax(u / temperature, dim=1), torch.log_softmax(y / temperature, dim=1)
    kd = temperature**2 * kl_div(log_q, log_p, log_target=True, reduction="none").sum(dim=1)
    ce = cross_entropy(y, case.labels, reduction="none", ignore_index=-100)
    per_token = torch.where(case.token_weights != 0, (1 - ce_weight) * kd + ce_weight * ce, 0.0)
    return (per_token * case.token_weights.double()).sum(), per_token


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
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
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


def test_oracle_with_every_id_cached_is_torchs_kl_div() -> None:
    case = make_case(top_k=24, temperature=1.7)
    loss, per_token, _, _ = oracle_run(case)
    full, full_per_token, _, _ = oracle_run(case, "full")
    torch.testing.assert_close(per_token, full_per_token)
    torch.testing.assert_close(loss, full)


def test_oracle_bucket_is_below_the_full_divergence() -> None:
    case = make_case(top_k=4)
    _, bucket, _, _ = oracle_run(case)
    _, full, _, _ = oracle_run(case, "full")
    assert (bucket > 0).all() and (bucket < full).all()
