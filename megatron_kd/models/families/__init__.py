"""The architectures that can be built, one file each. A new one is such a file and a line here."""

from __future__ import annotations

from megatron_kd.config import ModelConfig
from megatron_kd.models.families.family import EMBEDDING, FINAL_NORM, HEAD, Entry, Family
from megatron_kd.models.families.gpt_oss import GPT_OSS
from megatron_kd.models.families.llama import LLAMA
from megatron_kd.models.families.qwen3 import QWEN3

FAMILIES = {family.name: family for family in (LLAMA, QWEN3, GPT_OSS)}


def family_of(model: ModelConfig) -> Family:
    """The family of an architecture."""
    return FAMILIES[model.family]


def table(model: ModelConfig) -> list[Entry]:
    """Every kind of parameter of a model, in Megatron's order."""
    entries = [EMBEDDING, *family_of(model).layer, FINAL_NORM]
    return [*entries, HEAD] if model.untie_embeddings_and_output_weights else entries


__all__ = ["EMBEDDING", "FAMILIES", "FINAL_NORM", "HEAD", "Entry", "Family", "family_of", "table"]
