"""From corpus to samples: budgets, a split without leaks, reuse, and corpora larger than what is read."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest

from megatron_kd.data import corpus, selection
from megatron_kd.data import prepare as prepare_module
from megatron_kd.data.overlap import SHINGLE_WORDS, shared_fractions, shingles
from megatron_kd.data.prepare import prepare
from megatron_kd.data.samples import SampleSet, open_samples
from megatron_kd.data.tokenizer import Tokenizer, load_tokenizer
from megatron_kd.errors import ConfigError, DataError
from tests.unit.data_tokenizers import bpe, write_folder

WORDS = [f"w{i}" for i in range(500)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("tokenizer") / "tiny", bpe()))


def random_text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(WORDS, k=words))


def write_corpus(folder: Path, texts: Sequence[str]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(folder)


def prepared(folder: Path, tokenizer: Tokenizer, texts: Sequence[str], **changes: Any) -> SampleSet:
    arguments: dict[str, Any] = {"seq_length": 32, "progress": False, "out_dir": folder / "samples"} | changes
    path = write_corpus(folder / "corpus", texts)
    return prepare(corpus_format="jsonl", paths=[path], tokenizer=tokenizer, **arguments)


def documents_of(samples: SampleSet, split: str, eos_id: int) -> list[list[int]]:
    """The documents of a split, the last one perhaps cut short."""
    documents: list[list[int]] = [[]]
    for sample in samples.splits[split]:
        for token in samples.tokens(sample).tolist():
            if token == eos_id:
                documents.append([])
            else:
                documents[-1].append(token)
    return [document for document in documents if document]


def word_runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[i : i + SHINGLE_WORDS]) for i in range(max(len(words) - SHINGLE_WORDS, 0) + 1)}


def test_shingles_are_runs_of_words() -> None:
    generator = random.Random(0)
    text = random_text(generator, 60)
    assert len(shingles(text)) == len(word_runs(text)) == 48
    assert np.array_equal(shingles(text), shingles("  " + text.replace(" ", "\n\t ")))
    part = " ".join(text.split()[20:40])
    assert set(shingles(part).tolist()) < set(shingles(text).tolist()) and len(shingles(part)) == 8
    assert not set(shingles(" ".join(reversed(text.split()))).tolist()) & set(shingles(text).tolist())
    assert len(shingles("only three words")) == 1
    assert len(shingles(" \n")) == 0


def test_shared_fractions_against_sets() -> None:
    generator = random.Random(1)
    passages = [random_text(generator, 40) for _ in range(6)]
    texts = [
        " ".join([random_text(generator, 30), *generator.sample(passages, generator.randint(0, 2))]) for _ in range(12)
    ]
    texts += [texts[0], "short", "", "short"]
    runs = [word_runs(text) if text.split() else set() for text in texts]
    found = shared_fractions([shingles(text) for text in texts], map(shingles, texts))
    for i, own in enumerate(runs):
        others = set().union(*(runs[:i] + runs[i + 1 :]))
        assert found[i] == pytest.approx(len(own & others) / len(own) if own else 1.0)


def test_all_of_a_corpus(tmp_path: Path, tokenizer: Tokenizer) -> None:
    generator = random.Random(2)
    texts = [random_text(generator, generator.randint(1, 60)) for _ in range(40)] + [""]
    samples = prepared(tmp_path, tokenizer, texts)
    expected = {tuple(tokenizer.encode(text).tolist()) for text in texts} - {()}
    *whole, last = documents_of(samples, "train", tokenizer.eos_id)
    assert {tuple(document) for document in whole} <= expected
    assert len({tuple(document) for document in whole}) == len(whole) >= len(expected) - 3
    assert any(list(document[: len(last)]) == last for document in expected)
    total = sum(len(document) + 1 for document in expected)
    assert len(samples) == total // 32
    assert samples.splits == {"train": range(total // 32)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "samples"]


@pytest.mark.parametrize("train_tokens", [1000, None])
def test_budgets_and_a_split_by_document(tmp_path: Path, tokenizer: Tokenizer, train_tokens: int | None) -> None:
    generator = random.Random(3)
    texts = [random_text(generator, generator.randint(20, 60)) for _ in range(60)]
    samples = prepared(tmp_path, tokenizer, texts, train_tokens=train_tokens, heldout_tokens=330)
    n = samples.splits["train"].stop
    assert n == 31 if train_tokens else n > 100
    assert samples.splits == {"train": range(n), "heldout": range(n, n + 10)}
    train = {tuple(document[:20]) for document in documents_of(samples, "train", tokenizer.eos_id)}
    heldout = {tuple(document[:20]) for document in documents_of(samples, "heldout", tokenizer.eos_id)}
    assert len(train) > 3 and len(heldout) > 1
    assert not train & heldout


def test_repeated_passages_are_not_held_out(tmp_path: Path, tokenizer: Tokenizer) -> None:
    generator = random.Random(4)
    sections = [random_text(generator, 50) for _ in range(20)]
    alone = [random_text(generator, 50) for _ in range(4)]
    texts = [*sections, *alone, "\n\n".join(sections)]  # the last repeats the first twenty
    wanted = 3 * 32
    for seed in range(6):
        samples = prepared(tmp_path / str(seed), tokenizer, texts, heldout_tokens=wanted, seed=seed)
        starts = {tuple(tokenizer.encode(text)[:10].tolist()) for text in alone}
        for document in documents_of(samples, "heldout", tokenizer.eos_id):
            assert tuple(document[:10]) in starts
    with pytest.raises(DataError, match=r"share no long passage with others hold only \d+ \(4 of 25 documents\)"):
        prepared(tmp_path / "many", tokenizer, texts, heldout_tokens=2000)
    assert [path.name for path in (tmp_path / "many").iterdir()] == ["corpus"]


def test_candidates_are_widened_until_enough_are_alone(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(5)
    copies = [random_text(generator, 30)] * 200
    monkeypatch.setattr(selection, "_CANDIDATES", 2)
    alone = [random_text(generator, 30) for _ in range(3)]
    samples = prepared(tmp_path, tokenizer, copies + alone, heldout_tokens=64)
    starts = {tuple(tokenizer.encode(text)[:10].tolist()) for text in alone}
    assert {tuple(document[:10]) for document in documents_of(samples, "heldout", tokenizer.eos_id)} <= starts


def test_seed_and_order_of_the_corpus(tmp_path: Path, tokenizer: Tokenizer) -> None:
    generator = random.Random(6)
    texts = [random_text(generator, 30) for _ in range(50)]
    first = prepared(tmp_path / "a", tokenizer, texts, heldout_tokens=200)
    shuffled = generator.sample(texts, len(texts))
    same = prepared(tmp_path / "b", tokenizer, shuffled, heldout_tokens=200)
    other = prepared(tmp_path / "c", tokenizer, texts, heldout_tokens=200, seed=1)
    assert same.manifest["content"] == first.manifest["content"]
    assert other.manifest["content"] != first.manifest["content"]


def test_no_more_of_the_corpus_is_read_than_needed(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "_LEAST_SCANNED_TOKENS", 64)
    monkeypatch.setattr(selection, "_BATCH_CHARACTERS", 100)
    generator = random.Random(7)
    folder = tmp_path / "corpus"
    texts = [random_text(generator, 40) for _ in range(200)]
    write_corpus(folder, texts)
    with open(folder / "corpus.jsonl", "a") as file:
        file.write("not JSON\n")
    arguments: dict[str, Any] = {"corpus_format": "jsonl", "paths": [str(folder)], "tokenizer": tokenizer}
    arguments |= {"seq_length": 32, "progress": False}
    samples = prepare(**arguments, train_tokens=640, heldout_tokens=64, out_dir=tmp_path / "part")
    assert len(samples) == 22
    with pytest.raises(DataError, match=r"corpus\.jsonl:201 is not valid JSON"):
        prepare(**arguments, train_tokens=None, out_dir=tmp_path / "all")


def test_reading_further_where_the_first_part_does_not_do(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus begins with copies of one document, none of which can be held out."""
    monkeypatch.setattr(prepare_module, "_LEAST_SCANNED_TOKENS", 64)
    monkeypatch.setattr(selection, "_BATCH_CHARACTERS", 100)
    generator = random.Random(8)
    texts = [random_text(generator, 40)] * 100 + [random_text(generator, 40) for _ in range(5)]
    samples = prepared(tmp_path, tokenizer, texts, train_tokens=320, heldout_tokens=64)
    assert samples.splits == {"train": range(10), "heldout": range(10, 12)}


def test_an_earlier_set_is_reused_without_reading(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = random.Random(9)
    texts = [random_text(generator, 40) for _ in range(20)]
    first = prepared(tmp_path, tokenizer, texts)
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "_read_jsonl", None)
        assert prepared(tmp_path, tokenizer, texts).manifest == first.manifest
    with pytest.raises(DataError, match=r"corpus\.bytes is \d+ there, \d+ asked; corpus\.fingerprint"):
        prepared(tmp_path, tokenizer, [*texts, "one more"])
    with pytest.raises(DataError, match=r"selection\.train_tokens is None there, 64 asked"):
        prepared(tmp_path, tokenizer, texts, train_tokens=64)
    assert open_samples(tmp_path / "samples").manifest == first.manifest


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"packing": "docs"}, ConfigError, "packing 'docs' is unknown: choose one of concatenate, documents, padded"),
        ({"truncation": "cut"}, ConfigError, "truncation 'cut' is unknown: choose one of split, truncate, drop"),
        ({"seq_length": 1}, ConfigError, "seq_length is 1"),
        ({"train_tokens": 31}, ConfigError, "train_tokens 31 is less than one row"),
        ({"heldout_tokens": 31}, ConfigError, "heldout_tokens 31 is less than one row"),
        ({"seed": -1}, ConfigError, "seed"),
        ({"train_tokens": 10**6}, DataError, r"the corpus has only \d+ tokens for training .* 1000000 are needed"),
        ({"seq_length": 10**5}, DataError, r"are needed: lower data\.train_tokens or data\.seq_length"),
    ],
)
def test_refusals(
    tmp_path: Path, tokenizer: Tokenizer, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    texts = [random_text(random.Random(i), 40) for i in range(20)]
    with pytest.raises(error, match=message):
        prepared(tmp_path, tokenizer, texts, **changes)
    assert not (tmp_path / "samples").exists()


def test_pydoc_topics_do_not_leak(tmp_path: Path, tokenizer: Tokenizer, capfd: pytest.CaptureFixture[str]) -> None:
    """The documentation repeats itself: "compound" holds "if", "while", "for" …; each held-out topic stands alone."""
    samples = prepare(
        corpus_format="pydoc_topics",
        tokenizer=tokenizer,
        seq_length=240,
        train_tokens=40_000,
        heldout_tokens=5_000,
        out_dir=tmp_path / "samples",
    )
    assert samples.splits == {"train": range(166), "heldout": range(166, 186)}
    captured = capfd.readouterr()
    assert "rows" in captured.err and captured.out == ""
    by_start = {text[:60]: name for name, text in topics.items()}
    held = [by_start[tokenizer.decode(d)[:60]] for d in documents_of(samples, "heldout", tokenizer.eos_id)]
    assert len(held) >= 4
    for name in held:
        own = word_runs(topics[name])
        others = set().union(*(word_runs(text) for other, text in topics.items() if other != name))
        assert len(own & others) <= 0.01 * len(own), name
