"""Publishing files whole or not at all."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_kd.files import create_only, write_atomic, write_json


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"one")
    write_atomic(path, "zwölf")
    assert path.read_bytes() == "zwölf".encode()
    assert os.listdir(tmp_path) == ["file"]


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    for write in (write_atomic, create_only):
        with pytest.raises(OSError, match="No space left"):
            write(path, b"new")
    assert path.read_bytes() == b"old" and os.listdir(tmp_path) == ["file"]


def test_a_folder_that_is_missing_is_reported(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_atomic(tmp_path / "none" / "file", b"")


def test_a_folder_in_the_way_stays(tmp_path: Path) -> None:
    (tmp_path / "file" / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "file", b"new")
    assert os.listdir(tmp_path) == ["file"] and (tmp_path / "file" / "inside").is_dir()


def test_one_of_many_creates(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda i: create_only(path, str(i)), range(32)))
    assert won.count(True) == 1 and path.read_text() == str(won.index(True))
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_whose_answer_was_lost_is_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As over NFS: the server made the link, its answer was lost, the client asks again and is told that it exists."""
    link = os.link

    def asked_twice(source: Path, target: Path) -> None:
        with suppress(FileExistsError):
            link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", asked_twice)
    assert create_only(tmp_path / "file", b"ours")
    for others in (b"our", b"ours and more", b"else"):
        assert not create_only(tmp_path / "file", others)
    assert (tmp_path / "file").read_bytes() == b"ours"
    (tmp_path / "folder").mkdir()
    assert not create_only(tmp_path / "folder", b"ours")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize("first", [True, False])
def test_a_name_is_durable_for_whoever_finds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool) -> None:
    """The winner may not have come to its own sync yet when a loser takes its file away because of it."""
    path, synced = tmp_path / "file", list[bool]()
    if not first:
        path.write_bytes(b"of another")
    exact = os.fsync

    def seen(descriptor: int) -> None:
        synced.append(stat.S_ISDIR(os.fstat(descriptor).st_mode) and path.exists())
        exact(descriptor)

    monkeypatch.setattr(os, "fsync", seen)
    assert create_only(path, b"ours") == first
    assert synced[-1], "the folder is synced once the name is in it"


def test_json_is_readable(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", {"a": [1], "ü": None})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": [\n    1\n  ],\n  "ü": null\n}\n'
