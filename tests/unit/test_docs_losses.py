"""docs/losses.md says what is so: its figures are computed again here, its example runs."""

from __future__ import annotations

import gc
import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_kd.config import load_recipe
from megatron_kd.losses import DIVERGENCES, linear_topk_divergence, peak_extra_bytes, sizes
from megatron_kd.losses.divergences import make_divergence
from megatron_kd.losses.sizes import LONG_CONTEXT_ROWS, chunk_rows
from megatron_kd.models.vocabulary import padded_vocab_size
from megatron_kd.targets import TopKTargets
from tests.assets import ROOT
from tests.unit.test_losses_oracle import make_case

TEXT = (ROOT / "docs/losses.md").read_text()
TABLES = [
    {cells[0]: cells[1:] for cells in ([c.strip() for c in line.strip("|").split("|")] for line in block.splitlines())}
    for block in re.findall(r"(?:^\|.*\n)+", TEXT.replace(r"\|", "∣"), re.MULTILINE)
]
MIB = 2**20


def table(word: str) -> dict[str, list[str]]:
    """The first table with ``word`` in its first line: the cells behind the first of each row, by the first."""
    found = next(table for table in TABLES if word in " ".join(next(iter(table.items()))[1]))
    return dict(list(found.items())[2:])


CANNOT_MATCH, PULL, MEMORY, MODELS = (table(word) for word in ("centre", "rules out", "bytes per rank", "GPT-OSS"))


def loss_and_gradient(name: str, beta: float, p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Of distributions [..., outcomes]: the value, and the gradient with respect to the logits of q by autograd."""
    z = q.log().requires_grad_()
    log_q = z.log_softmax(dim=-1)
    m = beta * p + (1 - beta) * log_q.exp()
    value = {
        "forward_kl": lambda: p * (p.log() - log_q),
        "reverse_kl": lambda: log_q.exp() * (log_q - p.log()),
        "jsd": lambda: beta * p * (p / m).log() + (1 - beta) * log_q.exp() * (log_q - m.log()),
        "tvd": lambda: (p - log_q.exp()).abs() / 2,
    }[name]().sum(dim=-1)
    (gradient,) = torch.autograd.grad(value.sum(), z)
    return value.detach(), gradient


def bump(centre: Tensor | float, width: Tensor | float) -> Tensor:
    x = torch.arange(41, dtype=torch.float64)
    return torch.softmax(-((x - centre) ** 2) / (2 * torch.as_tensor(width) ** 2), dim=-1)


def divergence_of(label: str) -> tuple[str, float]:
    name, _, beta = label.replace("`", "").partition(", β = ")
    return name, float(beta or 0.5)


@pytest.mark.parametrize("label", CANNOT_MATCH)
def test_what_a_student_does_that_cannot_match(label: str) -> None:
    """The best of a grid of single bumps."""
    p = 0.6 * bump(10.0, 2.0) + 0.4 * bump(30.0, 2.0)
    centres = torch.linspace(0, 40, 161, dtype=torch.float64)
    widths = torch.linspace(-0.5, 3, 71, dtype=torch.float64).exp()
    q = bump(centres[:, None, None], widths[None, :, None])
    name, beta = divergence_of(label)
    d, _ = make_divergence(name, beta).terms(p.log().expand_as(q), q.log())
    best = int(d.sum(dim=-1).argmin())
    centre, width = centres[best // len(widths)], widths[best % len(widths)]
    found = q[best // len(widths), best % len(widths)]
    shares = [found[5:16].sum(), found[25:36].sum(), found[16:25].sum()]
    shown = [float(cell) for cell in CANNOT_MATCH[label]]
    assert shown[:2] == pytest.approx([float(centre), float(width)], abs=0.051)
    assert shown[2:] == pytest.approx([float(share) for share in shares], abs=0.0051)


@pytest.mark.parametrize("label", PULL)
def test_how_hard_it_pulls(label: str) -> None:
    name, beta = divergence_of(label)
    shown = [float(cell.replace("−", "-")) for cell in PULL[label]]
    ignored = loss_and_gradient(name, beta, torch.tensor([0.5, 0.5]).double(), torch.tensor([1 - 1e-6, 1e-6]).double())
    excluded = loss_and_gradient(name, beta, torch.tensor([1 - 1e-9, 1e-9]).double(), torch.tensor([0.5, 0.5]).double())
    assert shown == pytest.approx([float(ignored[1][1]), float(excluded[1][1])], rel=0.03)


def test_the_tables_of_behaviour_are_whole() -> None:
    for shown in (CANNOT_MATCH, PULL):
        assert {divergence_of(label)[0] for label in shown} == set(DIVERGENCES)


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
def test_bounds_and_limits(beta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 400, 9, generator=generator, dtype=torch.float64) * 40
    log_p, log_q = logits.log_softmax(dim=-1)
    log_p[:9, 3] = -torch.inf
    value, gradient = {}, {}
    for name in DIVERGENCES:
        divergence = make_divergence(name, beta)
        d, u = divergence.terms(divergence.cached_log_p(log_p.exp()), log_q)
        value[name] = d.sum(dim=-1)
        gradient[name] = (u - log_q.exp() * u.sum(dim=-1, keepdim=True)).abs().sum(dim=-1)
    assert 50 < value["reverse_kl"].max() <= 100
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert 0.99 * entropy < value["jsd"].max() <= entropy + 1e-12
    assert 0.99 < value["tvd"].max() <= 1 + 1e-12
    assert gradient["forward_kl"].max() <= 2 + 1e-12
    assert gradient["tvd"].max() <= 0.5 + 1e-12 < gradient["reverse_kl"].max()

    p, q = (logits[:, 20] / 20).softmax(dim=-1)
    nearly = [float(loss_and_gradient("jsd", b, p, q)[0]) for b in (1e-6, 1 - 1e-6)]
    kls = [float(loss_and_gradient(name, 0.5, p, q)[0]) for name in ("forward_kl", "reverse_kl")]
    assert [1e6 * x for x in nearly] == pytest.approx(kls, rel=1e-4)


def test_truncate_pulls_m_times_as_renormalize_teacher() -> None:
    case = make_case()
    gradients: dict[str, Any] = {}
    for tail in ("truncate", "renormalize_teacher"):
        hidden = case.hidden.detach().requires_grad_()
        weights = torch.zeros_like(case.token_weights)
        weights[3] = 1.0
        linear_topk_divergence(
            hidden, case.weight.detach(), case.targets, weights, tail=tail, vocab_size=24
        ).loss.backward()
        gradients[tail] = hidden.grad
    mass = case.targets.flatten().logprobs[3].double().exp().sum()
    assert 0.1 < mass < 0.99
    torch.testing.assert_close(gradients["truncate"], mass * gradients["renormalize_teacher"])


def test_t2_keeps_the_gradient_from_fading() -> None:
    generator = torch.Generator().manual_seed(0)
    u, z = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    norm = {}
    for t in (4.0, 8.0, 16.0):
        gradient = loss_and_gradient("forward_kl", 0.5, (u / t).softmax(dim=0), (z / t).softmax(dim=0))[1] / t
        norm[t] = float(gradient.norm())
    assert norm[8.0] == pytest.approx(norm[4.0] / 4, rel=0.1) and norm[16.0] == pytest.approx(norm[8.0] / 4, rel=0.1)


def _extra(tokens: int, size: int, mode: str, dtype: torch.dtype) -> int:
    vocab, k = 2048, 100
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=generator).to(dtype).requires_grad_()
    head = (torch.randn(vocab, size, generator=generator) / size**0.5).to(dtype).requires_grad_()
    ids = (torch.randint(vocab, (tokens, 1), generator=generator) + torch.arange(k) * 20) % vocab
    logprobs = torch.randn(tokens, k, generator=generator).log_softmax(dim=1) - 0.1
    targets = TopKTargets(ids.int(), logprobs.half(), torch.full((tokens,), math.log(1 - math.exp(-0.1))))

    def run() -> None:
        out = linear_topk_divergence(
            hidden, head, targets, torch.ones(tokens), vocab_size=vocab, mode=mode, chunk_bytes=MIB
        )
        out.loss.backward()  # with the figures still held, as training does

    gc.collect()
    return peak_extra_bytes(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_further_token(dtype: torch.dtype) -> None:
    single, recompute = re.findall(r"\d+", MEMORY["per token"][0])
    for mode, per_token in (("single_pass", single), ("recompute", recompute)):
        growth = (_extra(2048, 256, mode, dtype) - _extra(1024, 256, mode, dtype)) / 1024
        assert growth == pytest.approx(256 * dtype.itemsize + int(per_token), abs=4)
        assert f"{growth:,.0f}" in TEXT


def test_recompute_does_not_lower_the_peak_of_one_microbatch() -> None:
    peaks = {mode: _extra(1024, 256, mode, torch.float32) for mode in ("single_pass", "recompute")}
    assert peaks["recompute"] > 0.95 * peaks["single_pass"]


@pytest.mark.parametrize(
    ("column", "size", "vocab", "tokens", "tp", "per_logit"),
    [(0, 2880, 201_088, 32_768, 8, 10), (1, 4096, 128_256, 8192, 1, 6)],
)
def test_the_two_models(column: int, size: int, vocab: int, tokens: int, tp: int, per_logit: int) -> None:
    """By the chunks that the losses cut; 10 bytes are two float32 buffers and a bf16 copy, 6 are one and the copy."""
    shown = {first: cells[column] for first, cells in MODELS.items()}
    head, shard = padded_vocab_size(vocab, tp) // tp, -(-vocab // tp)
    rows = chunk_rows(tokens, shard * per_logit, 1024 * MIB)
    dh, dw, buffers = 2 * size * tokens / tp, 4 * size * head, rows * min(head, vocab) * per_logit
    assert shown["D, V, Vl"] == f"{size:,}, {vocab:,}, {head:,}"
    assert shown["chunks × rows"] == f"{-(-tokens // rows)} × {rows:,}"
    assert shown["chunk buffers"] == f"{buffers / MIB:,.0f} MiB ({per_logit} bytes a logit)"
    assert shown["dH"] == f"{dh / MIB:,.0f} MiB"
    assert shown["dW"] == f"{dw / MIB:,.0f} MiB"
    assert shown["sum, while the loss runs forward"] == f"{(buffers + dh + dw) / MIB:,.0f} MiB"
    assert shown["held until backward (what `gradient_mib` is compared with)"] == (
        f"{(dh + 4 * size * shard) / MIB:,.0f} MiB"
    )
    assert shown["one float32 [N, Vl]"] == f"{4 * tokens * head / MIB:,.0f} MiB"
    assert (
        shown["a further token"] == f"{2 * size // tp + int(re.findall(r'[0-9]+', MEMORY['per token'][0])[0]):,} bytes"
    )


def test_what_a_gpu_spends_on_reading_and_writing_dw() -> None:
    share = {rows: 8 / 4.8e12 / (6 * rows / 700e12) for rows in (4096, 1280, 256)}
    assert "194/c" in TEXT and round(share[256] * 256) == 194
    assert "5 % at 4,096 rows, 15 % at 1,280, 76 % at 256" in TEXT
    assert [round(100 * value) for value in share.values()] == [5, 15, 76]
    assert "64 on a CPU, 1,536 on a GPU" in TEXT
    assert sizes.DEFAULT_CHUNK_BYTES == {"cpu": 64 << 20, "cuda": 1536 << 20}


def test_long_contexts_begin_where_the_page_says() -> None:
    assert f"From {LONG_CONTEXT_ROWS:,} rows on" in TEXT


def test_the_example_runs() -> None:
    [snippet] = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(snippet, names)
    assert names["hidden"].grad is not None and names["head"].grad is not None
    assert names["out"].loss > 0


def test_what_it_links_to_and_names_exists() -> None:
    for target in re.findall(r"[^!]\[[^]]*\]\(([^)#]+)\)", TEXT):
        assert (ROOT / "docs" / target).exists(), target
    for path in re.findall(r"`((?:tests|losses|config)/[\w/]+\.py)`", TEXT):
        assert (ROOT / path).exists() or (ROOT / "megatron_kd" / path).exists(), path
    for line in re.findall(r"`megatron-kd train (\S+) ([^`]*)`", TEXT):
        load_recipe(ROOT / line[0], line[1].split())
