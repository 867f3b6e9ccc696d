"""Megatron-Core models against Hugging Face's: logits and gradients in every layout, and chosen layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_kd.config import ModelConfig, ParallelismConfig
from megatron_kd.testing import run_distributed
from tests.assets import smollm2_checkpoint
from tests.models_oracles import smollm2_hf_folder, smollm2_model, tiny_variants

LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def join(tp: int, sequence_parallel: bool) -> tuple[ParallelismConfig, Any]:
    """New model-parallel groups over the ranks there are."""
    from megatron.core import parallel_state

    from megatron_kd.device import select_device
    from megatron_kd.models.parallel import init_model_parallel

    select_device("cpu")
    parallel_state.destroy_model_parallel()
    layout = ParallelismConfig(tensor_model_parallel_size=tp, sequence_parallel=sequence_parallel)
    return layout, init_model_parallel(layout, seed=1)


def imported(model: ModelConfig, folder: str, layout: ParallelismConfig, groups: Any, trainable: bool) -> Any:
    """The model with its Hugging Face weights, straight into this rank's shards."""
    from megatron_kd.models.build import build_model
    from megatron_kd.models.hf_source import open_hf_weights
    from megatron_kd.models.load import load_hf_weights

    built = build_model(model, layout, groups, "fp32", trainable=trainable)
    load_hf_weights(built, model, open_hf_weights(folder), groups.tp_rank, groups.tp_size)
    return built


def all_logits(built: Any, tokens: torch.Tensor, groups: Any, vocab_size: int) -> torch.Tensor:
    """[b, s, V], gathered over the tensor-parallel group and freed of padding."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        local = built(tokens, positions, None)
    if groups.tp_group is None:
        return local[..., :vocab_size]
    parts = [torch.empty_like(local) for _ in range(groups.tp_size)]
    dist.all_gather(parts, local.contiguous(), group=groups.tp_group)
    return torch.cat(parts, dim=-1)[..., :vocab_size]


def worst_gradient(built: Any, model: ModelConfig, oracle: dict[str, Any], groups: Any) -> float:
    """The largest error of a gradient of Σ cross-entropy, relative to that parameter's largest gradient."""
    from megatron_kd.losses import linear_topk_divergence
    from megatron_kd.models.head import head_of, vocab_start
    from megatron_kd.models.hf_names import entries, merged, name_of, shard
    from megatron_kd.models.vocabulary import padded_vocab_size
    from megatron_kd.targets import TopKTargets

    tokens, labels = oracle["tokens"], oracle["labels"].t().reshape(-1)
    count = tokens.numel()
    nothing = TopKTargets(
        torch.full((count, 1), -1, dtype=torch.int32), torch.full((count, 1), -torch.inf), torch.zeros(count)
    )

    def cross_entropy(*, hidden_states: Any, output_layer: Any, output_weight: Any, **_: Any) -> Any:
        weight = head_of(output_layer, output_weight)
        return linear_topk_divergence(
            hidden_states,
            weight,
            nothing,
            torch.ones(count),
            labels=labels,
            ce_weight=1.0,
            vocab_size=model.vocab_size,
            vocab_start=vocab_start(weight, groups),
            group=groups.tp_group,
            sequence_parallel=groups.sequence_parallel,
        ).loss

    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    built(tokens, positions, None, output_processor=cross_entropy).backward()
    padded = padded_vocab_size(model.vocab_size, groups.tp_size)
    parameters, worst = dict(built.named_parameters()), 0.0
    for entry, layer in entries(model):
        ours = parameters[name_of(entry.megatron, layer)]
        assert ours.grad is not None
        # What Megatron-Core's finalize_model_grads does with parameters that say they saw a part of the tokens.
        if getattr(ours, "sequence_parallel", False):
            dist.all_reduce(ours.grad, group=groups.tp_group)
        theirs = shard(
            entry, merged(entry, layer, oracle["grads"].__getitem__, model, padded), groups.tp_rank, groups.tp_size
        )
        worst = max(worst, float((ours.grad - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3)))
    return worst


def parity_rank(rank: int, world: int, variants: list[tuple[dict[str, Any], str]]) -> dict[str, tuple[float, float]]:
    """The worst error of logits and gradients of every variant in every layout."""
    errors = {}
    for tp, sequence_parallel in LAYOUTS:
        layout, groups = join(tp, sequence_parallel)
        for values, folder in variants:
            model = ModelConfig.model_validate(values)
            oracle = torch.load(Path(folder) / "oracle.pt")
            built = imported(model, folder, layout, groups, trainable=True)
            logits = all_logits(built, oracle["tokens"], groups, model.vocab_size)
            gap = float((logits - oracle["logits"]).abs().max())
            errors[f"{Path(folder).name} tp{tp} sp{sequence_parallel}"] = (
                gap,
                worst_gradient(built, model, oracle, groups),
            )
    return errors


def test_tiny_models_equal_hugging_face_in_every_layout(tmp_path: Path) -> None:
    ranks = run_distributed(parity_rank, 4, tiny_variants(tmp_path))
    assert len(ranks[0]) == 20
    for errors in ranks:
        for case, (logits, gradient) in errors.items():
            assert logits < 2e-5, (case, logits)
            assert gradient < 2e-5, (case, gradient)


def smollm2_rank(rank: int, world: int, folder: str, checkpoint: str) -> dict[str, float]:
    """Errors of SmolLM2's logits at TP 3 + SP and TP 1, and how far imported and converted weights are apart."""
    from megatron_kd.models.build import build_model
    from megatron_kd.models.checkpoint import load_weights

    model, oracle, figures = smollm2_model(), torch.load(Path(folder) / "oracle.pt"), {}
    for tp, sequence_parallel in ((3, True), (1, False)):
        layout, groups = join(tp, sequence_parallel)
        built = imported(model, folder, layout, groups, trainable=False)
        logits = all_logits(built, oracle["tokens"], groups, model.vocab_size)
        figures[f"tp{tp} from Hugging Face"] = float((logits - oracle["logits"]).abs().max())
        again = build_model(model, layout, groups, "fp32", trainable=False)
        load_weights(again, model, Path(checkpoint))
        pairs = zip(built.parameters(), again.parameters(), strict=True)
        figures[f"tp{tp} weights"] = max(float((a - b).abs().max()) for a, b in pairs)
        del built
        logits = all_logits(again, oracle["tokens"], groups, model.vocab_size)
        figures[f"tp{tp} from the checkpoint"] = float((logits - oracle["logits"]).abs().max())
        del again, logits
    return figures


@pytest.mark.slow
def test_smollm2_equals_hugging_face_at_tp1_and_tp3() -> None:
    ranks = run_distributed(smollm2_rank, 3, str(smollm2_hf_folder()), str(smollm2_checkpoint()))
    for figures in ranks:
        assert {name: gap for name, gap in figures.items() if "weights" in name} == {
            "tp3 weights": 0.0,
            "tp1 weights": 0.0,
        }
        logits = {name: gap for name, gap in figures.items() if "from" in name}
        assert len(logits) == 4
        assert max(logits.values()) <= 2e-4, logits
    print(ranks[0])
