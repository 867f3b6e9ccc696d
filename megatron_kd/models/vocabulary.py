"""Padding of the vocabulary, so that the embedding splits evenly over tensor-parallel ranks."""

from __future__ import annotations

DIVISIBLE_BY = 128  # Megatron's make_vocab_size_divisible_by: rows of a shard are a multiple of this


def padded_vocab_size(vocab_size: int, tensor_model_parallel_size: int) -> int:
    """The number of embedding rows over all ranks: the next multiple of 128 · TP.

    Rows from ``vocab_size`` on are padding. ``GPTModel`` neither creates nor masks them: whoever turns hidden states
    into probabilities must give them no mass.
    """
    multiple = DIVISIBLE_BY * tensor_model_parallel_size
    return -(-vocab_size // multiple) * multiple
