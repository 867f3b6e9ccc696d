"""Corpora: order, streaming, and errors that name file and line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest

from megatron_kd.data import corpus
from megatron_kd.data.corpus import corpus_identity, read_documents
from megatron_kd.errors import DataError


def test_pydoc_topics() -> None:
    found = list(read_documents("pydoc_topics"))
    assert len(found) == len(topics) > 50
    assert found[0] == topics[min(topics)]
    assert sorted(found) == sorted(topics.values())


def test_text_files_folders_and_patterns(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "2.txt").write_bytes(b"two\r\nlines")
    (tmp_path / "b" / "1.md").write_bytes("eins ü".encode())
    (tmp_path / "b" / "picture.png").write_bytes(b"\xff\xfe")
    (tmp_path / "b" / ".hidden.txt").write_text("hidden")
    with gzip.open(tmp_path / "a.txt.gz", "wb") as file:
        file.write(b"packed")
    assert list(read_documents("text", [str(tmp_path)])) == ["packed", "eins ü", "two\r\nlines"]
    assert list(read_documents("text", [str(tmp_path / "b" / "2.txt"), str(tmp_path / "b")])) == [
        "two\r\nlines",
        "eins ü",
    ]
    assert list(read_documents("text", [str(tmp_path / "**" / "*.md")])) == ["eins ü"]
    with pytest.raises(DataError, match=r"picture\.png cannot be read as UTF-8"):
        list(read_documents("text", [str(tmp_path / "b" / "*.png")]))


def test_jsonl(tmp_path: Path) -> None:
    lines = [{"text": "one\u2028still one"}, {"text": "", "other": 1}, {"text": "three"}]
    (tmp_path / "x.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    assert list(read_documents("jsonl", [str(tmp_path)])) == ["one\u2028still one", "", "three"]
    with gzip.open(tmp_path / "y.jsonl.gz", "wt") as file:
        file.write('{"body": "packed"}\n')
    assert list(read_documents("jsonl", [str(tmp_path / "y*")], text_key="body")) == ["packed"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{'text': 1}", r"x\.jsonl:3 is not valid JSON"),
        (b'{"text": "\xff"}', r"x\.jsonl:3 is not valid JSON"),
        (b'{"body": "b"}', r"x\.jsonl:3 has no key 'text', only 'body'"),
        (b'{"text": 7}', r"x\.jsonl:3: the value of 'text' is int"),
        (rb'{"text": "half \ud800"}', r"x\.jsonl:3: the value of 'text' is not valid Unicode"),
        (b'["text"]', r"x\.jsonl:3 holds a JSON list"),
    ],
)
def test_jsonl_errors_name_the_line_and_come_only_there(tmp_path: Path, line: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
    documents = read_documents("jsonl", [str(tmp_path / "x.jsonl")])
    assert next(documents) == "good"
    with pytest.raises(DataError, match=message):
        next(documents)


def test_damaged_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(b'{"text": "a"}\n' * 10_000)
    (tmp_path / "x.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError, match=r"x\.jsonl\.gz cannot be read behind line \d"):
        list(read_documents("jsonl", [str(tmp_path)]))
    flipped = bytearray(gzip.compress(bytes(range(256)) * 50))
    flipped[20] ^= 0xFF
    (tmp_path / "x.txt.gz").write_bytes(flipped)
    with pytest.raises(DataError, match=r"x\.txt\.gz cannot be read"):
        list(read_documents("text", [str(tmp_path)]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("parquet", ["x"]), "unknown corpus format 'parquet'"),
        (("text", []), "at least one path"),
        (("jsonl", ["/nowhere/*.jsonl"]), "no file of the corpus at '/nowhere"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_documents(*arguments)


def test_identity_is_of_the_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def identity_of(folder: str, contents: list[bytes]) -> dict[str, object]:
        (tmp_path / folder).mkdir()
        for number, content in enumerate(contents):
            (tmp_path / folder / f"{number}.txt").write_bytes(content)
        return corpus_identity("text", [str(tmp_path / folder)])

    base = identity_of("a", [b"one", b"two"])
    assert base["files"] == 2 and base["bytes"] == 6
    assert identity_of("b", [b"one", b"two"]) == base
    assert identity_of("c", [b"onet", b"wo"])["fingerprint"] != base["fingerprint"]
    assert identity_of("d", [b"two", b"one"])["fingerprint"] != base["fingerprint"]

    # Large files are sampled: a change of the ends or of the size shows.
    monkeypatch.setattr(corpus, "_WHOLE_FILE_BYTES", 1000)
    monkeypatch.setattr(corpus, "_BLOCK_BYTES", 10)
    large = bytes(range(256)) * 20
    changes: list[Callable[[bytes], bytes]] = [lambda b: b"x" + b[1:], lambda b: b[:-1] + b"x", lambda b: b + b"x"]
    sampled = identity_of("e", [large])
    for number, change in enumerate(changes):
        assert identity_of(f"f{number}", [change(large)])["fingerprint"] != sampled["fingerprint"]
