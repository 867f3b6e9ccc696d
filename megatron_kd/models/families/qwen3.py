"""Qwen3, dense: a Llama whose queries and keys are normalised head by head before the rotation."""

from megatron_kd.models.families.family import DENSE_MLP, HF_LAYER, INPUT_NORM, LAYER, Entry, Family, attention

QWEN3 = Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    layer=(
        INPUT_NORM,
        *attention(bias=False),
        *(
            Entry(f"{LAYER}self_attention.{x}_layernorm.weight", (f"{HF_LAYER}self_attn.{x}_norm.weight",))
            for x in "qk"
        ),
        *DENSE_MLP,
    ),
    hf_constants={"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"},
    qk_layernorm=True,
)
