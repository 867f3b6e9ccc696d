"""The engine vllm against the engine hf, with a stand-in for the package vllm that scores with a real model.

The stand-in has the names, arguments and answers of vLLM's ``LLM`` and ``SamplingParams`` that the engine uses.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_kd.config import Recipe
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.teacher.engine import open_teacher
from megatron_kd.teacher.hf_engine import HFTeacher
from megatron_kd.teacher.vllm_engine import VLLMTeacher, _gpus, _own_environment
from tests.unit.test_teacher_hf_engine import TOP_K, V, recipe_of, save
from tests.unit.test_teacher_vllm_logprobs import Entry, request_output


@dataclass
class OldSamplingParams:
    """Arguments of vLLM's class, before it had a flat form."""

    max_tokens: int = 16
    temperature: float = 1.0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True


@dataclass
class SamplingParams(OldSamplingParams):
    """Arguments of vLLM's class."""

    flat_logprobs: bool = False


class LLM:
    """Scores prompts by their contract: the K likeliest tokens in float32, and the token that is there before them."""

    def __init__(self, model: str, *, dtype: str, max_model_len: int, max_logprobs: int = 20, **others: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.environment = dict(os.environ)
        self.arguments = {"dtype": dtype, **others}
        self._limits = max_model_len, max_logprobs
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))

    @torch.no_grad()
    def generate(
        self, prompts: list[dict[str, list[int]]], sampling_params: Any, *, use_tqdm: bool = True
    ) -> list[Any]:
        top_k = sampling_params.prompt_logprobs
        if top_k > self._limits[1]:
            raise ValueError(f"Requested prompt logprobs of {top_k}, which is greater than max allowed")
        outputs = []
        for prompt in prompts:
            tokens = prompt["prompt_token_ids"]
            if len(tokens) + sampling_params.max_tokens > self._limits[0]:
                raise ValueError(f"The prompt of {len(tokens)} tokens is too long")
            logprobs = self._model(torch.tensor([tokens])).logits[0].float().log_softmax(dim=1)
            values, ids = logprobs.topk(top_k, dim=1)
            there = [*tokens[1:], int(logprobs[-1].argmax())]
            entries: list[Entry] = [
                [(token, float(logprobs[n, token])), *zip(ids[n].tolist(), values[n].tolist(), strict=True)]
                for n, token in enumerate(there)
            ]
            outputs.append(request_output(tokens, entries, getattr(sampling_params, "flat_logprobs", False)))
        return outputs


def imitation() -> Any:
    """What ``import vllm`` gives."""
    return SimpleNamespace(LLM=LLM, SamplingParams=SamplingParams, __version__="0.33.0")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The module, imported by that name."""
    module: SimpleNamespace = imitation()
    monkeypatch.setitem(sys.modules, "vllm", module)
    return module


def vllm_recipe(folder: Path, source: Path, *overrides: str) -> Recipe:
    return recipe_of(folder, source, "teacher.engine=vllm", "teacher.temperatures=[1.0]", *overrides)


@pytest.mark.parametrize("params", [SamplingParams, OldSamplingParams])
def test_the_targets_are_those_of_the_engine_hf(tmp_path: Path, package: SimpleNamespace, params: type) -> None:
    package.SamplingParams = params
    source = save(tmp_path / "model", "qwen2")
    recipe = vllm_recipe(tmp_path, source)
    teacher = open_teacher(recipe, None)  # type: ignore[arg-type]  # engines of one rank need no groups
    assert isinstance(teacher, VLLMTeacher)
    tokens = torch.randint(0, V, (3, 32), generator=torch.Generator().manual_seed(1))
    got = teacher.top_k(tokens)
    expected = HFTeacher(recipe_of(tmp_path, source)).top_k(tokens)
    assert torch.equal(got.targets.ids, expected.targets.ids) and got.targets.ids.shape == (96, TOP_K)
    torch.testing.assert_close(got.targets.logprobs, expected.targets.logprobs, rtol=0, atol=2e-5)
    torch.testing.assert_close(got.targets.tail_logmass, expected.targets.tail_logmass, rtol=0, atol=1e-4)
    assert got.targets.temperature == 1.0 and got.log_normalizers == {}
    documents = torch.stack([torch.arange(32) // n for n in (32, 9, 5)])
    got, expected = (engine.top_k(tokens, documents) for engine in (teacher, HFTeacher(recipe_of(tmp_path, source))))
    assert torch.equal(got.targets.ids, expected.targets.ids)
    torch.testing.assert_close(got.targets.logprobs, expected.targets.logprobs, rtol=0, atol=2e-5)


def test_the_identity_says_how_the_answers_came_about(tmp_path: Path, package: SimpleNamespace) -> None:
    source = save(tmp_path / "model", "qwen2")
    identity = VLLMTeacher(vllm_recipe(tmp_path, source, "teacher.vllm.dtype=bf16")).identity()
    like_hf = HFTeacher(recipe_of(tmp_path, source, "teacher.hf.dtype=bf16")).identity()
    assert identity == {
        **like_hf,
        "engine": "vllm",
        "engine_version": "0.33.0",
        "quantization": None,
        "tail": "by subtraction",
    }


def test_what_vllm_is_started_with(tmp_path: Path, package: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of torchrun's environment reaches it, and all of it is there afterwards."""
    torchrun = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "GROUP_RANK"}
    for name in torchrun:
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("HF_HOME", "kept")
    before = dict(os.environ)
    source = save(tmp_path / "model", "qwen2")
    options = ("tensor_parallel_size=4", "gpu_memory_utilization=0.5", "max_num_batched_tokens=2048")
    teacher = VLLMTeacher(vllm_recipe(tmp_path, source, *(f"teacher.vllm.{option}" for option in options)))
    assert dict(os.environ) == before
    added = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "HF_HOME": "kept"}
    seen = teacher._engine.environment
    assert added.items() <= seen.items() and not torchrun & set(seen)
    assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" not in seen
    assert teacher._engine.arguments == {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "tensor_parallel_size": 4,
        "gpu_memory_utilization": 0.5,
        "max_num_batched_tokens": 2048,
        "logprobs_mode": "raw_logprobs",
        "enable_prefix_caching": False,
        "distributed_executor_backend": "mp",
        "seed": 1234,
    }


def test_each_rank_has_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with _own_environment("5", longer=True):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5" and os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] == "1"
    monkeypatch.setattr("megatron_kd.teacher.vllm_engine.is_cuda", lambda: True)
    monkeypatch.setattr("megatron_kd.teacher.vllm_engine.current_device", lambda: torch.device("cuda", 2))
    node: Any = SimpleNamespace(cluster=SimpleNamespace(gpus_per_node=4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert _gpus(node) == "2"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b,GPU-c,GPU-d")
    assert _gpus(node) == "GPU-c"
    node.cluster.gpus_per_node = 1
    assert _gpus(node) is None


def test_failures_of_vllm_are_one_line(tmp_path: Path, package: SimpleNamespace) -> None:
    source = save(tmp_path / "model", "qwen2")
    teacher = VLLMTeacher(vllm_recipe(tmp_path, source))
    with pytest.raises(CheckpointError, match=r"vLLM failed on rows of 33 tokens: .*too long"):
        teacher.top_k(torch.zeros(1, 33, dtype=torch.int64))
    teacher._engine.generate = lambda *_, **__: []
    with pytest.raises(CheckpointError, match="answered other rows"):
        teacher.top_k(torch.zeros(1, 32, dtype=torch.int64))

    def broken(**_: Any) -> None:
        raise RuntimeError("Engine core initialization failed.\nSee root cause above.")

    package.LLM = broken
    with pytest.raises(
        CheckpointError, match=r"vLLM cannot run .*model: Engine core initialization failed\."
    ) as caught:
        VLLMTeacher(vllm_recipe(tmp_path, source))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif("vllm" in sys.modules, reason="vLLM is loaded")
def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'megatron-kd\[vllm\]'"):
        VLLMTeacher(vllm_recipe(tmp_path, save(tmp_path / "model", "qwen2")))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["teacher.model.hf=null"], "teacher.model.hf is not set"),
        (["teacher.model.hf=/nowhere"], "'/nowhere', which does not exist"),
        (
            ["cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2"],
            "tensor_model_parallel_size 1, not 2",
        ),
        (["cluster.gpus_per_node=2", "teacher.vllm.tensor_parallel_size=2"], "or tensor_parallel_size to 1"),
        (["teacher.temperatures=[1.0,2.0]"], "at temperature 1 alone"),
        (["teacher.temperatures=[2.0]"], "at temperature 1 alone"),
        (["teacher.engine=hf", "teacher.vllm.dtype=bf16"], "vllm is set, but engine is 'hf'"),
        (["teacher.hf.dtype=bf16"], "hf is set, but engine is 'vllm'"),
        (["teacher.mode=online", "teacher.targets=top_k"], "engine 'vllm' only captures"),
    ],
)
def test_recipes_that_cannot_be(tmp_path: Path, package: SimpleNamespace, overrides: list[str], words: str) -> None:
    source = save(tmp_path / "model", "qwen2")
    with pytest.raises(ConfigError) as caught:
        VLLMTeacher(vllm_recipe(tmp_path, source, *overrides))
    assert words in str(caught.value)


def test_weights_that_are_not_the_recipes(tmp_path: Path, package: SimpleNamespace) -> None:
    source = save(tmp_path / "model", "qwen2", num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"num_layers 3, teacher.model 'teacher' says 2"):
        VLLMTeacher(vllm_recipe(tmp_path, source))
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"the file .*model.gguf: the engine vllm reads folders of safetensors"):
        VLLMTeacher(vllm_recipe(tmp_path, source, f"teacher.model.hf={gguf}"))
