"""Text to token ids with the tokenizer of a Hugging Face folder or a GGUF file."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from megatron_kd.data.gguf_metadata import gguf_string
from megatron_kd.errors import DataError


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Loads the tokenizer of a Hugging Face folder (0.1 s) or of a GGUF file (4 s and more: ``save`` it once).

    Nothing is downloaded. Raises DataError where there is no tokenizer, or none with an end-of-sequence token.
    """
    from transformers import AutoTokenizer

    source = Path(source)
    if not source.exists():
        raise DataError(f"no tokenizer at {source}: give a Hugging Face folder or a GGUF file")
    is_gguf = source.is_file()
    if is_gguf and source.suffix != ".gguf":
        raise DataError(f"the tokenizer {source} is a file but not a .gguf one: give its folder")
    try:
        if is_gguf:
            tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise DataError(f"no tokenizer can be loaded from {source}: {error}") from error
    if not isinstance(getattr(tokenizer, "backend_tokenizer", None), tokenizers.Tokenizer):
        raise DataError(f"the tokenizer in {source} has no tokenizer.json: convert it to one of the tokenizers library")
    if tokenizer.eos_token_id is None:
        raise DataError(f"the tokenizer in {source} has no eos_token: packing needs one behind each document")
    if is_gguf:
        _restore_pre_tokenizer(tokenizer.backend_tokenizer, source)
    place = source.resolve()
    # An imported teacher keeps its tokenizer in a folder of that name, which tells nobody apart.
    name = f"{place.parent.name}/{place.name}" if place.name == "tokenizer" else place.name
    return Tokenizer(tokenizer, source.stem if is_gguf else name)


class Tokenizer:
    """A tokenizer and the identity by which samples, caches and models know that they share it.

    Attributes:
        name: of the folder or file it came from; for people, no part of the identity.
        eos_id: the id that packing puts behind each document.
        vocab_size: one more than the largest id, added tokens included.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = tokenizer
        self.name = name
        self.eos_id = int(tokenizer.eos_token_id)
        self.vocab_size = max(len(tokenizer), 1 + max(tokenizer.get_vocab().values()))

    @property
    def transformers(self) -> Any:
        """The tokenizer of transformers that this is."""
        return self._tokenizer

    def encode(self, text: str) -> NDArray[np.int32]:
        """Token ids [n], without any token that the text does not hold.

        Control tokens that are spelled out in the text (``<|im_end|>``) become those tokens: a corpus of rendered
        conversations relies on it.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        """``encode`` of several texts, on all the threads that the tokenizers library takes."""
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of token ids [n], control tokens spelled out."""
        return str(self._tokenizer.decode([int(i) for i in ids], clean_up_tokenization_spaces=False))

    def identity(self) -> dict[str, Any]:
        """What the ids mean: name, vocab_size, sha256 and segmentation_sha256.

        ``sha256`` is over vocabulary, merges and added tokens, so that two tokenizers with the same one give the same
        meaning to every id: the teacher's and the student's must agree in it. ``segmentation_sha256`` is over what
        else decides which ids a text becomes (normaliser, pre-tokenizer, model options, eos token): samples with
        another one were cut differently. Neither depends on the file format.
        """
        return {"name": self.name, "vocab_size": self.vocab_size, **self._digests}

    def save(self, folder: str | Path) -> None:
        """Writes a Hugging Face folder that ``load_tokenizer`` reads at once. One that holds this tokenizer is kept.

        Raises DataError where the folder holds anything else.
        """
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            if load_tokenizer(folder)._digests != self._digests:
                raise DataError(f"{folder} holds another tokenizer: remove it or choose another folder")
            return
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}.tmp")
        try:
            self._tokenizer.save_pretrained(temporary)
            os.rename(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @cached_property
    def _digests(self) -> dict[str, str]:
        state = json.loads(self._tokenizer.backend_tokenizer.to_str())
        model = state["model"]
        scores = model["vocab"] if isinstance(model["vocab"], list) else None  # a Unigram model: [[piece, score], …]
        content = {
            "vocab": sorted(self._tokenizer.get_vocab().items(), key=lambda entry: (entry[1], entry[0])),
            # older files spell a merge as one string
            "merges": [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])],
            "scores": scores,
            "added": sorted((token["id"], token["content"], token["special"]) for token in state["added_tokens"]),
        }
        segmentation = {
            "normalizer": state["normalizer"],
            "pre_tokenizer": state["pre_tokenizer"],
            "model": {key: value for key, value in model.items() if key not in ("vocab", "merges")},
            "eos": self.eos_id,
        }
        return {"sha256": _sha256(content), "segmentation_sha256": _sha256(segmentation)}


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _restore_pre_tokenizer(backend: tokenizers.Tokenizer, source: Path) -> None:
    # Transformers does not read the GGUF key that names the pre-tokenizer and takes GPT-2's. SmolLM splits every
    # digit first; without that "  12" becomes other tokens than those the model was trained on.
    if gguf_string(source, "tokenizer.ggml.pre") == "smollm":
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
            [
                tokenizers.pre_tokenizers.Digits(individual_digits=True),
                tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
            ]
        )
