"""The model on a GPU, with Transformer Engine and without, against the same weights on the CPU; teacher extraction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_kd.config import ModelConfig
from megatron_kd.testing import run_distributed
from tests.models_oracles import (
    grouped_model,
    random_hf_model,
    scaled_llama,
    tiny_gpt_oss,
    tiny_qwen3,
    write_oracle,
)

# Sizes that attention kernels and grouped matrix products take.
SIZES: dict[str, Any] = {"kv_channels": 64, "hidden_size": 128, "ffn_hidden_size": 192}
MODELS = {
    "llama": grouped_model(**SIZES),
    "scaled llama": scaled_llama(**SIZES),
    "qwen3": tiny_qwen3(**SIZES),
    "gpt_oss": tiny_gpt_oss(**SIZES),
}
PACKED = {f"{name} packed": MODELS[name] for name in ("llama", "gpt_oss")}
"""The same models on rows of several documents, each of which Hugging Face's model sees alone."""
DOCUMENTS = [37, 1, 60, 30]
# Past the windows of GPT-OSS, and past the context that scaled positions begin at.
TOKENS = 128


def cuda_rank(
    rank: int, world: int, name: str, folder: str, transformer_engine: bool, precision: Any, tp: int
) -> dict[str, float]:
    """Errors of logits (of their spread) and, in float32, of gradients, against Hugging Face on the CPU."""
    from megatron_kd.config import ParallelismConfig
    from megatron_kd.device import is_cuda, select_device
    from megatron_kd.models import spec
    from megatron_kd.models.build import build_model
    from megatron_kd.models.hf_source import open_hf_weights
    from megatron_kd.models.load import load_hf_weights
    from megatron_kd.models.parallel import init_model_parallel

    device = select_device("h200")
    assert is_cuda()
    if not transformer_engine:
        spec.use_transformer_engine = lambda: False
    model: ModelConfig = (MODELS | PACKED)[name]
    layout = ParallelismConfig(tensor_model_parallel_size=tp, sequence_parallel=tp > 1)
    groups = init_model_parallel(layout, seed=1)
    built = build_model(model, layout, groups, precision, trainable=True)
    load_hf_weights(built, model, open_hf_weights(folder), groups)
    oracle = torch.load(Path(folder) / "oracle.pt")
    tokens = oracle["tokens"].to(device)
    documents = oracle["documents"].to(device) if "documents" in oracle else None
    local = built(tokens, groups.context.places(tokens, documents), documents)
    parts = [local]
    if groups.tp_group is not None:
        parts = [torch.empty_like(local) for _ in range(tp)]
        torch.distributed.all_gather(parts, local.detach().contiguous(), group=groups.tp_group)
    logits = torch.cat(parts, dim=-1)[..., : model.vocab_size].float()
    figures = {"logits": float((logits.detach().cpu() - oracle["logits"]).abs().max() / oracle["logits"].std())}
    if tp == 1:
        labels = oracle["labels"].flatten().to(device)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels, reduction="sum").backward()
        gradient = built.output_layer.weight.grad[: model.vocab_size].float().cpu()
        expected = oracle["grads"]["lm_head.weight"]
        figures["gradient"] = float((gradient - expected).abs().max() / expected.abs().max())
    return figures


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Weights and oracle of each model."""
    paths = {}
    for name, model in (MODELS | PACKED).items():
        path = tmp_path_factory.mktemp("model")
        built = random_hf_model(model)
        built.save_pretrained(path)
        paths[name] = str(write_oracle(built, path, model.vocab_size, TOKENS, DOCUMENTS if name in PACKED else None))
    return paths


def require_transformer_engine() -> None:
    """Skips where Transformer Engine is not installed."""
    pytest.importorskip("transformer_engine.pytorch")


# TF32 and half-precision attention kernels round more than float32 does.
@pytest.mark.parametrize(("precision", "tolerance"), [("fp32", 2e-2), ("bf16", 1e-1)])
@pytest.mark.parametrize("transformer_engine", [False, True], ids=["local", "transformer engine"])
@pytest.mark.parametrize("name", [*MODELS, *PACKED])
def test_the_model_computes_what_it_does_on_the_cpu(
    folders: dict[str, str], name: str, transformer_engine: bool, precision: str, tolerance: float
) -> None:
    if transformer_engine:
        require_transformer_engine()
    (figures,) = run_distributed(cuda_rank, 1, name, folders[name], transformer_engine, precision, 1, backend="nccl")
    assert set(figures) == {"logits", "gradient"}
    assert max(figures.values()) < tolerance, figures


def test_two_gpus_share_the_model(folders: dict[str, str]) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for figures in run_distributed(cuda_rank, 2, "llama", folders["llama"], False, "fp32", 2, backend="nccl"):
        assert figures["logits"] < 2e-2, figures


def test_top_k_extraction_equals_float64() -> None:
    from megatron_kd.teacher.topk import extract_top_k
    from tests.unit.test_teacher_topk import oracle

    generator = torch.Generator().manual_seed(8)
    hidden = torch.randn(70, 64, generator=generator).bfloat16()
    head = torch.randn(1024, 64, generator=generator).bfloat16()
    got = extract_top_k(hidden.cuda(), head.cuda(), 20, vocab_size=1000, chunk_bytes=4 * 1024 * 16).targets
    _, logprobs, tail = oracle(hidden, head[:1000], 20, 1.0)
    torch.testing.assert_close(got.logprobs.double().cpu(), logprobs, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.tail_logmass.double().cpu(), tail, rtol=0, atol=1e-4)
