"""The teacher as vLLM runs it: log-probabilities of prompts, with prefix caching off. Written, not run here.

What vLLM tells is less than what the other engines compute: log-probabilities at temperature 1, from logits that it
rounds to the model's dtype, without the mass outside the K, which is therefore found by subtraction; and where logits
equal the K-th it has chosen among them.

vLLM runs in processes of its own: one engine for each of our ranks, on that rank's GPU, or with
``vllm.tensor_parallel_size`` above 1 one engine on each node. They have nothing to do with our process groups, but
would take torchrun's environment variables for their own; they are started without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_kd.config import Recipe
from megatron_kd.device import current_device, fail_together, first_rank_tells, is_cuda
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.checkpoint_files import one_line
from megatron_kd.models.hf_source import SafetensorsFolder, resolve_source, weights_sha256
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.documents_apart import document_spans
from megatron_kd.teacher.hf_layout import check_layout
from megatron_kd.teacher.hf_loading import LoadedModel, config_sha256, described_architecture
from megatron_kd.teacher.topk import ExtractedTopK
from megatron_kd.teacher.vllm_logprobs import row_targets

ENGINE = "vllm"
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_OF_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PREFIXES_OF_TORCHRUN = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_VISIBLE = "CUDA_VISIBLE_DEVICES"


class VLLMTeacher:
    """A frozen model loaded from the folder ``teacher.model.hf``, behind vLLM's ``LLM.generate``."""

    def __init__(self, recipe: Recipe) -> None:
        """Compares the folder with the recipe and starts vLLM on it. Collective over all ranks.

        Raises:
            ConfigError: vLLM is not installed, there is no source of weights, or a layout it does not run in.
            CheckpointError: the weights are missing, damaged or not those the recipe describes, or vLLM cannot load
                them.
        """
        check_layout(
            recipe,
            sources="a folder of safetensors",
            spread="teacher.vllm.tensor_parallel_size",
            value=recipe.teacher.vllm.tensor_parallel_size,
            alone=1,
        )
        self._teacher = recipe.teacher
        self._precision = recipe.teacher.vllm.dtype or recipe.training.precision
        with fail_together("describing the teacher"):
            self._vllm = _installed()
            loaded = _describe(recipe)
            self._architecture = described_architecture(recipe.teacher.model, loaded)
        # By one rank for all: reading large weights once more on every rank would take its time.
        digest = first_rank_tells(f"hashing {loaded.path}", lambda: weights_sha256(SafetensorsFolder(loaded.path)))
        self._loaded = replace(loaded, weights_sha256=digest)
        with fail_together("starting vLLM"):
            self._engine = _start(self._vllm, recipe, self._loaded, self._precision)
        self._sampling = _sampling(self._vllm, recipe.teacher.top_k)

    def identity(self) -> dict[str, Any]:
        """What decides this teacher's answers; kept in every cache it writes. Where it runs is no part of it."""
        config = self._loaded.model.config
        quantization = getattr(config, "quantization_config", None) or {}
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
        return {
            "name": self._teacher.model.name,
            "weights_sha256": self._loaded.weights_sha256,
            "architecture": self._architecture,
            "model_type": config.model_type,
            "config_sha256": self._loaded.config_sha256,
            "engine": ENGINE,
            "engine_version": self._vllm.__version__,
            "dtype": self._precision,
            "quantization": quantization.get("quant_method"),
            "tail": "by subtraction",
        }

    def top_k(self, tokens: Tensor, documents: Tensor | None = None) -> ExtractedTopK:
        """The top-K targets of every position at temperature 1, [N] = [s·b] sequence first.

        Args:
            tokens: int64 [b, s]; each row is one prompt.
            documents: integers [b, s]; each document is then one.

        Raises:
            CheckpointError: vLLM fails, or answers what is not the top-K of these rows.
        """
        asked = tokens.tolist()
        if documents is not None:
            asked = [asked[row][start:stop] for row, start, stop in document_spans(documents)]
        prompts = [{"prompt_token_ids": prompt} for prompt in asked]
        try:
            outputs = self._engine.generate(prompts, self._sampling, use_tqdm=False)
        except Exception as error:  # its processes may fail in any way
            raise CheckpointError(f"vLLM failed on rows of {tokens.shape[1]} tokens: {one_line(error)}") from error
        if [list(output.prompt_token_ids) for output in outputs] != asked:
            raise CheckpointError("vLLM answered other rows than it was asked for: this version cannot be the teacher")
        answers = [
            row_targets(output, len(prompt), self._teacher.top_k, self._teacher.model.vocab_size)
            for output, prompt in zip(outputs, asked, strict=True)
        ]
        ids, logprobs, tail = (
            # Prompts follow each other as their tokens do, row by row.
            torch.from_numpy(np.concatenate(arrays)).to(tokens.device).unflatten(0, tokens.shape).transpose(0, 1)
            for arrays in (
                [answer.ids for answer in answers],
                [answer.logprobs for answer in answers],
                [answer.tail_logmass for answer in answers],
            )
        )
        ids, logprobs, tail = (part.flatten(0, 1) for part in (ids, logprobs, tail))
        return ExtractedTopK(TopKTargets(ids, logprobs, tail, 1.0), {})


def _installed() -> Any:
    try:
        return import_module("vllm")
    except ImportError as error:
        raise ConfigError(
            f"teacher.engine is vllm, which cannot be imported ({one_line(error)}): pip install 'megatron-kd[vllm]', "
            "or set teacher.engine to hf"
        ) from error


def _describe(recipe: Recipe) -> LoadedModel:
    """The folder and its configuration, without its weights in memory and without their hash."""
    from transformers import AutoConfig

    path = resolve_source(recipe.teacher.model.hf or "")
    if path.is_file():
        raise ConfigError(f"teacher.model.hf names the file {path}: the engine vllm reads folders of safetensors")
    weights = SafetensorsFolder(path)
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a reader of JSON that anyone wrote
        raise CheckpointError(f"{path}/config.json cannot be read by transformers: {one_line(error)}") from error
    return LoadedModel(path, SimpleNamespace(config=config), "", config_sha256(weights.config()))


def _start(vllm: Any, recipe: Recipe, loaded: LoadedModel, precision: str) -> Any:
    """An ``LLM`` that scores rows of the recipe's length."""
    options = recipe.teacher.vllm
    length = recipe.data.seq_length
    arguments: dict[str, Any] = {
        "model": str(loaded.path),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "load_format": "safetensors",
        "dtype": _DTYPES[precision],
        "tensor_parallel_size": options.tensor_parallel_size,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        # The token that is generated for the last position's sake needs a place.
        "max_model_len": length + 1,
        "max_logprobs": recipe.teacher.top_k,
        "logprobs_mode": "raw_logprobs",
        # A position whose keys and values are found in a cache is not scored.
        "enable_prefix_caching": False,
        "seed": recipe.seed,
    }
    if options.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    if options.max_num_batched_tokens is not None:
        arguments["max_num_batched_tokens"] = options.max_num_batched_tokens
    longer = length + 1 > recipe.teacher.model.max_position_embeddings
    with _own_environment(_gpus(recipe), longer):
        try:
            return vllm.LLM(**arguments)
        except Exception as error:  # of its own kinds, or those of the process that it starts
            raise CheckpointError(f"vLLM cannot run {loaded.path}: {one_line(error)}") from error


def _sampling(vllm: Any, top_k: int) -> Any:
    """One token, of which only the distribution is used: how it is drawn does not matter."""
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "logprobs": top_k, "prompt_logprobs": top_k}
    if hasattr(vllm.SamplingParams, "flat_logprobs"):  # without it a dictionary for every position
        options["flat_logprobs"] = True
    return vllm.SamplingParams(**options, detokenize=False)


def _gpus(recipe: Recipe) -> str | None:
    """The GPUs that this rank's vLLM shall see; None for those that this process sees."""
    if recipe.cluster.gpus_per_node == 1 or not is_cuda():
        return None
    seen = [name for name in os.environ.get(_VISIBLE, "").split(",") if name]
    local_rank = current_device().index or 0
    return seen[local_rank] if seen else str(local_rank)


@contextmanager
def _own_environment(gpus: str | None, longer: bool) -> Iterator[None]:
    """The environment that vLLM's processes start in: they see their GPUs and nothing of our ranks.

    Args:
        gpus: for CUDA_VISIBLE_DEVICES; vLLM numbers the devices of every engine from 0.
        longer: let rows be one longer than the model's positions: the generated token is never read.
    """
    before = dict(os.environ)
    for name in before:
        if name in _OF_TORCHRUN or name.startswith(_PREFIXES_OF_TORCHRUN):
            del os.environ[name]
    # In this process vLLM would join our process group; a forked one could not use the GPU.
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if gpus is not None:
        os.environ[_VISIBLE] = gpus
    if longer:
        os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
