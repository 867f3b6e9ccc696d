"""The teacher as transformers runs it: any causal language model in a local folder or a GGUF file.

The model gives hidden states, and the head's rows are read by our own top-K extraction, chunk by chunk. What else a
model does to its logits (a bias, a scale, a soft cap) is applied, or the model is refused; a probe at the start
compares a few positions with the model's own logits, so that nothing unknown is passed over.

b rows, s positions, N = s·b tokens sequence first, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_kd.config import Recipe
from megatron_kd.device import current_device, fail_together, is_cuda
from megatron_kd.errors import CheckpointError, ConfigError
from megatron_kd.models.checkpoint_files import one_line
from megatron_kd.targets import TopKTargets
from megatron_kd.teacher.documents_apart import documents_apart
from megatron_kd.teacher.hf_layout import check_layout
from megatron_kd.teacher.hf_loading import LoadedModel, described_architecture, load_model
from megatron_kd.teacher.topk import ExtractedTopK, extract_top_k

ENGINE = "hf"
PROBE_TOKENS = 8
_SCALES = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Keys of configurations that scale the logits: the factor's exponent."""
_SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Keys of configurations that have a soft cap c: logits become c·tanh(logits / c), after bias and scale."""
_GEMM_MULTIPLE = 8  # columns that tensor cores like in 16 bits


class HFTeacher:
    """A frozen model loaded from ``teacher.model.hf``, whole on each rank."""

    def __init__(self, recipe: Recipe) -> None:
        """Loads the model, compares it with the recipe and with its own logits. Collective over all ranks.

        Raises:
            ConfigError: no source of weights, or a layout that this engine does not run in.
            CheckpointError: weights that are missing, damaged or not those the recipe describes, or a model whose
                logits are not its hidden states times its head.
        """
        _check_layout(recipe)
        self._teacher = recipe.teacher
        chunk_mib = recipe.loss.chunk_mib
        self._chunk_bytes = None if chunk_mib is None else int(chunk_mib * 2**20)
        self._precision = recipe.teacher.hf.dtype or recipe.training.precision
        self._loaded: LoadedModel = load_model(recipe.teacher.model.hf, self._precision, recipe.teacher.hf.device_map)
        with fail_together(f"checking {self._loaded.path}"):  # one rank alone may run out of memory
            self._architecture = described_architecture(recipe.teacher.model, self._loaded)
            self.head = Head(self._loaded.model, recipe.teacher.model.vocab_size)
            self._check_logits()

    def identity(self) -> dict[str, Any]:
        """What decides this teacher's answers; kept in every cache it writes. Where it runs is no part of it."""
        return {
            "name": self._teacher.model.name,
            "weights_sha256": self._loaded.weights_sha256,
            "architecture": self._architecture,
            "model_type": self._loaded.model.config.model_type,
            "config_sha256": self._loaded.config_sha256,
            "engine": ENGINE,
            "dtype": self._precision,
        }

    @torch.no_grad()
    def hidden_states(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """The last hidden states [s, b, D], after the final norm, on the head's device.

        Args:
            tokens: int64 [b, s]; each row is one sequence, without an attention mask.
            documents: integers [b, s]; each document is then a row of its own, which every causal model understands.
        """
        if documents is not None:
            return documents_apart(self.hidden_states, tokens, documents)
        hidden: Tensor = self._loaded.model.base_model(input_ids=tokens, use_cache=False)[0]
        return hidden.transpose(0, 1).to(self.head.weight.device)

    @torch.no_grad()
    def top_k(self, tokens: Tensor, documents: Tensor | None = None) -> ExtractedTopK:
        """The top-K targets of every position, [N] = [s·b] sequence first, at the recipe's temperatures.

        Args:
            tokens: int64 [b, s].
            documents: see ``TeacherEngine.top_k``.
        """
        return self._extract(tokens, documents, self._teacher.top_k, tuple(self._teacher.temperatures))

    def _extract(
        self, tokens: Tensor, documents: Tensor | None, top_k: int, temperatures: tuple[float, ...]
    ) -> ExtractedTopK:
        hidden = self.hidden_states(tokens, documents)
        return self.head.top_k(hidden.reshape(-1, hidden.shape[-1]), top_k, temperatures, self._chunk_bytes)

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compares a few positions with the model's own logits.

        Raises:
            CheckpointError: they differ by more than the rounding of logits to the model's dtype, or the model does
                not take tokens and give hidden states as wide as its head.
        """
        vocab, model = self._teacher.model.vocab_size, self._loaded.model
        tokens = torch.linspace(0, vocab - 1, PROBE_TOKENS, device=current_device()).long()[None]
        try:
            targets = self._extract(tokens, None, vocab, (1.0,)).targets
            logits = model(input_ids=tokens, use_cache=False).logits
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{self._loaded.path}: the engine hf cannot run a {model.config.model_type!r} model: {one_line(error)}"
            ) from error
        own = logits[0].to(targets.logprobs.device, torch.float32)
        expected = own.log_softmax(dim=-1).gather(1, targets.ids.long())
        apart = (targets.logprobs - expected).abs().max().item()
        rounding = 2 * torch.finfo(self.head.weight.dtype).eps * own.abs().max().item()
        if not apart <= 1e-3 + rounding:  # NaN fails
            raise CheckpointError(
                f"{self._loaded.path}: the logits of a {model.config.model_type!r} model are not its last hidden "
                f"states times its output head (log-probabilities differ by {apart:.2g}); the engine hf cannot run it"
            )


class Head:
    """The output head of a transformers model: the rows [V, D], a bias if any, scale and soft cap of the logits."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        """Raises CheckpointError for a head that cannot be read row by row."""
        config = model.config.get_text_config()
        layer = model.get_output_embeddings()
        weight = getattr(layer, "weight", None)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point() or weight.device.type == "meta":
            raise CheckpointError(
                f"the {config.model_type!r} model has no output head in floating point in memory, whose rows the "
                "engine hf reads: use weights with a head that is not quantised, and GPUs that hold it"
            )
        if weight.shape[0] != vocab_size:
            raise CheckpointError(
                f"the output head has {weight.shape[0]} rows, teacher.model.vocab_size is {vocab_size}: "
                f"set it to {weight.shape[0]}"
            )
        self.scale = logit_scale(config)
        self.softcap = logit_softcap(config)
        # A bias is one more column of the head, against a hidden unit of 1.
        self._columns = 0
        bias = getattr(layer, "bias", None)
        if bias is not None:
            self._columns = _GEMM_MULTIPLE - weight.shape[1] % _GEMM_MULTIPLE
            weight = torch.cat((weight, pad(bias[:, None], (0, self._columns - 1))), dim=1)
        self.weight: Tensor = weight.detach()

    def top_k(
        self, hidden: Tensor, top_k: int, temperatures: tuple[float, ...], chunk_bytes: int | None
    ) -> ExtractedTopK:
        """``extract_top_k`` of the model's logits, hidden [N, D]. The first temperature is that of the targets."""
        if self._columns:
            hidden = pad(pad(hidden, (0, 1), value=1.0), (0, self._columns - 1))
        # Logits times a scale at a temperature are the bare ones at temperature / scale: nothing is rounded. So is
        # c·tanh(scale·x / c) scale times the bare x soft-capped at c / scale.
        first, *others = (temperature / self.scale for temperature in temperatures)
        bare = extract_top_k(
            hidden,
            self.weight,
            top_k,
            vocab_size=self.weight.shape[0],
            temperature=first,
            extra_temperatures=tuple(others),
            logit_softcap=None if self.softcap is None else self.softcap / self.scale,
            chunk_bytes=chunk_bytes,
        )
        targets = TopKTargets(bare.targets.ids, bare.targets.logprobs, bare.targets.tail_logmass, temperatures[0])
        # Normalizers depend on the ratio of two temperatures, which the scale leaves alone.
        return ExtractedTopK(targets, dict(zip(temperatures[1:], bare.log_normalizers.values(), strict=True)))


def logit_scale(config: Any) -> float:
    """The factor between hidden states times head and logits, from a transformers configuration.

    Raises CheckpointError for one that is not a positive number.
    """
    scale = 1.0
    for key, exponent in _SCALES.items():
        scale *= (_positive(config, key) or 1.0) ** exponent
    return scale


def logit_softcap(config: Any) -> float | None:
    """The c of logits c·tanh(x / c), from a transformers configuration; None where there is no soft cap.

    Raises CheckpointError for one that is not a positive number.
    """
    return next((cap for key in _SOFT_CAPS if (cap := _positive(config, key)) is not None), None)


def _positive(config: Any, key: str) -> float | None:
    value = getattr(config, key, None)
    if value is None:
        return None
    if not isinstance(value, int | float) or not value > 0:
        raise CheckpointError(f"the model's configuration has {key} {value!r}, which must be a positive number")
    return float(value)


def _check_layout(recipe: Recipe) -> None:
    device_map = recipe.teacher.hf.device_map
    check_layout(
        recipe, sources="a folder or a GGUF file", spread="teacher.hf.device_map", value=device_map, alone=None
    )
    if device_map is not None and not is_cuda():
        raise ConfigError(
            f"teacher.hf.device_map is {device_map!r}, but cluster.gpu is {recipe.cluster.gpu!r}: it spreads layers "
            "over GPUs; set it to null"
        )
