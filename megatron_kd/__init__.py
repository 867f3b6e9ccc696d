"""Knowledge distillation on Megatron-Core with a top-K teacher cache and a fused tensor-parallel divergence."""

__version__ = "0.1.0"
