"""The peers of ``bench loss`` are called right: their values and gradients are those their definitions say.

N tokens, D hidden, V vocabulary, K cached tokens.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_kd.bench import peers
from megatron_kd.bench.cases import Loss
from megatron_kd.bench.inputs import LossInputs, make_inputs
from megatron_kd.losses import IMPLEMENTATIONS
from megatron_kd.targets import TopKTargets

N, D, V, K = 23, 12, 150, 9
CPU = torch.device("cpu")


@pytest.fixture
def inputs() -> LossInputs:
    """Targets in float32 whose tail is what the ids leave of 1: there our bucket and 1 − Σ say the same."""
    made = make_inputs(N, D, V, K, torch.float32, CPU)
    logprobs = made.targets.logprobs.float()
    tail = torch.log1p(-logprobs.double().exp().sum(dim=1)).float()
    weights = torch.ones(N)
    weights[3] = 0
    return LossInputs(made.hidden, made.head, TopKTargets(made.targets.ids, logprobs, tail), weights)


def value_and_gradients(inputs: LossInputs, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    hidden = inputs.hidden.clone().requires_grad_()
    head = inputs.head.clone().requires_grad_()
    value = loss(hidden, head)
    value.backward()
    assert hidden.grad is not None and head.grad is not None
    return value.detach(), hidden.grad, head.grad


def test_megatron_lm_agrees_with_our_bucket(inputs: LossInputs) -> None:
    def ours(hidden: Tensor, head: Tensor) -> Tensor:
        method = IMPLEMENTATIONS["dense"].topk
        return method(hidden, head, inputs.targets, inputs.token_weights, vocab_size=V, tail="bucket").loss

    theirs = value_and_gradients(inputs, peers.megatron_lm_topk(inputs))
    for got, expected in zip(theirs, value_and_gradients(inputs, ours), strict=True):
        assert expected.abs().max() > 1e-2
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_megatron_lm_leaves_its_inputs_alone(inputs: LossInputs) -> None:
    """It edits float32 logits in place: of the benchmark's inputs, nothing may change from round to round."""
    before = [t.clone() for t in (inputs.hidden, inputs.head, inputs.targets.ids, inputs.targets.logprobs)]
    value_and_gradients(inputs, peers.megatron_lm_topk(inputs))
    after = (inputs.hidden, inputs.head, inputs.targets.ids, inputs.targets.logprobs)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_dense_probabilities(inputs: LossInputs) -> None:
    dense = peers.dense_probabilities(inputs.targets, V)
    assert dense.shape == (N, V) and dense.dtype == torch.float32
    torch.testing.assert_close(dense.sum(dim=1), torch.ones(N))
    torch.testing.assert_close(dense.gather(1, inputs.targets.ids.long()), inputs.targets.logprobs.exp())
    other = dense.clone().scatter_(1, inputs.targets.ids.long(), -1.0)
    for row in other:
        assert row[row >= 0].unique().numel() == 1, "the tail is spread evenly"


def test_dense_probabilities_without_a_tail() -> None:
    logprobs = torch.log_softmax(torch.randn(5, 6), dim=1)
    ids = torch.arange(6, dtype=torch.int32).expand(5, 6)
    targets = TopKTargets(ids, logprobs, torch.full((5,), -torch.inf))
    torch.testing.assert_close(peers.dense_probabilities(targets, 6), logprobs.exp())


@pytest.mark.skipif(not hasattr(torch.nn.functional, "linear_cross_entropy"), reason="torch before 2.13")
def test_torch_is_the_cross_entropy_of_the_whole_distribution(inputs: LossInputs) -> None:
    """Against Σ p·(lse − z) and its closed-form gradient q − p in float64."""
    p = peers.dense_probabilities(inputs.targets, V).double()
    hidden, head = inputs.hidden.double(), inputs.head.double()
    z = hidden @ head.t()
    expected = (p * (torch.logsumexp(z, dim=1, keepdim=True) - z)).sum()
    dz = torch.softmax(z, dim=1) - p
    value, hidden_gradient, head_gradient = value_and_gradients(inputs, peers.torch_linear_cross_entropy(inputs))
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(hidden_gradient.double(), dz @ head, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head_gradient.double(), dz.t() @ hidden, rtol=1e-4, atol=1e-5)


def test_who_is_left_out_and_why() -> None:
    found, notes = peers.available_peers(CPU)
    assert {peer.name for peer in found} | {note.split()[0] for note in notes} == {peer.name for peer in peers.PEERS}
    assert "liger_jsd" not in {peer.name for peer in found}, "its kernels need a GPU"


def test_a_peer_that_is_not_installed_or_has_changed() -> None:
    for module, name in (("no_such_package.losses", "loss"), ("torch.nn.functional", "no_such_loss")):
        with pytest.raises(peers.PeerUnavailableError, match=f"{name} of {module} cannot be imported"):
            peers._import(module, name)
