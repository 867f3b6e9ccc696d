"""Llama 3.x and SmolLM2: grouped queries, SwiGLU, no biases; Llama-3 rope scaling; tied or untied head."""

from megatron_kd.models.families.family import DENSE_MLP, INPUT_NORM, Family, attention

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    layer=(INPUT_NORM, *attention(bias=False), *DENSE_MLP),
    hf_constants={"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"},
)
