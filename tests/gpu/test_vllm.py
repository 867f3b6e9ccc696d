"""The engine vllm itself against the engine hf: two captures of the same rows, compared as anyone would do it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_kd.cache.drift import DriftReport, cache_drift
from megatron_kd.config import ModelConfig
from tests.assets import ROOT, megatron_kd, succeed, tiny_llama_folder, tiny_recipe
from tests.models_oracles import random_hf_model

# In float32 kernels differ in the order of their sums; in bfloat16 vLLM rounds the logits to 8 bits as well.
CASES = [("fp32", 2e-3, 0.99), ("bf16", 0.1, 0.9)]


def teacher_folder(folder: Path) -> tuple[ModelConfig, Path]:
    """A random Llama with heads of a size that attention kernels take, and the tokenizer of the small one."""
    tiny = yaml.safe_load((ROOT / "configs/models/tiny_llama.yaml").read_text())
    model = ModelConfig.model_validate({**tiny, "name": "wide_heads", "kv_channels": 64})
    source = folder / "model"
    shutil.copytree(tiny_llama_folder(), source)
    built = random_hf_model(model)
    built.lm_head.weight.data.mul_(20.0)  # logits of a spread that real models have
    built.save_pretrained(source)
    return model, source


def drift_of_captures(folder: Path, gpu: str, dtype: str, engines: tuple[str, str]) -> DriftReport:
    """Captures the same samples with two engines and compares the caches."""
    model, source = teacher_folder(folder)
    caches = [folder / f"cache_{i}_{engine}" for i, engine in enumerate(engines)]
    for cache, engine in zip(caches, engines, strict=True):
        teacher: dict[str, Any] = {"engine": engine, engine: {"dtype": dtype}, "cache": str(cache), "checkpoint": None}
        described = {**model.model_dump(mode="json"), "hf": str(source)}
        recipe = tiny_recipe(
            folder,
            teacher={**teacher, "model": described, "capture": {"micro_batch_size": 8, "rows_per_shard": 16}},
            cluster={"gpu": gpu},
        )
        if cache is caches[0]:
            succeed(megatron_kd("prepare", recipe))
        succeed(megatron_kd("capture", recipe, timeout=500.0))
    return cache_drift(caches[0], caches[1])


@pytest.mark.parametrize(("dtype", "difference", "agreement"), CASES)
def test_vllm_and_transformers_agree(tmp_path: Path, dtype: str, difference: float, agreement: float) -> None:
    pytest.importorskip("vllm")
    report = drift_of_captures(tmp_path, "h200", dtype, ("hf", "vllm"))
    assert report.rows > 10 and report.teachers_differ_in is not None
    assert report.logprob_mean < difference, report.text()
    assert report.top1_agreement > agreement, report.text()
