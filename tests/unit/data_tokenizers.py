"""Small real tokenizers: byte-level BPE trained on a few sentences, as a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tokenizers
from gguf import GGUFWriter
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEXT = ["the cat sat on the mat and the dog sat on the log", "a statement and an expression are not the same thing"]
EOS = "<|im_end|>"


def bpe(vocab_size: int = 300, *, split_digits: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE whose first ids are the control tokens, SmolLM's pre-tokenizer by default."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level]) if split_digits else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT * 4 + ["  \n\n    " * 50], trainer)
    return tokenizer


def write_folder(folder: Path, tokenizer: tokenizers.Tokenizer, eos: str | None = EOS) -> Path:
    """Saves as transformers does."""
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    if eos is not None:
        fast.eos_token = eos
    fast.save_pretrained(folder)
    return folder


def write_gguf(path: Path, tokenizer: tokenizers.Tokenizer, pre: str = "smollm") -> Path:
    """A GGUF file that holds the tokenizer and no tensor that matters."""
    state = json.loads(tokenizer.to_str())
    special = {token["id"] for token in state["added_tokens"]}
    pieces = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(pieces)
    writer.add_token_types([3 if i in special else 1 for i in range(len(pieces))])
    writer.add_token_merges([" ".join(merge) for merge in state["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
