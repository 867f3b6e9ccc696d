"""``megatron-kd bench loss`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib.image
import pytest

from tests.assets import succeed
from tests.e2e.road import files_below, one_error_line
from tests.warm import warm

SIZES = ["--hidden", "8", "--vocab", "300", "--top-k", "4", "--rounds", "1", "--threads", "1", "--device", "cpu"]


def test_json_alone_on_standard_output_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    done = succeed(warm("bench", "loss", "--sweep-tokens", "32,64", *SIZES, "--figure", picture, "--json"))
    found = json.loads(done.stdout)
    assert {row["tokens"] for row in found["results"]} == {32, 64}
    names = {row["implementation"] for row in found["results"]}
    assert {"floor", "fused", "forward_chunked", "dense", "megatron_lm_topk"} <= names
    assert found["notes"] and all(f"note: {note}" in done.stderr.splitlines() for note in found["notes"])
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr
    assert files_below(tmp_path) == ["loss.png"] and min(matplotlib.image.imread(picture).shape[:2]) > 300


def test_text() -> None:
    text = succeed(warm("bench", "loss", "--tokens", "32", *SIZES)).stdout.splitlines()
    assert text[0] == "32 tokens, hidden 8, vocabulary 300, top 4, fp32, cpu"
    assert text[1].split() == ["implementation", "mode", "×", "floor", "seconds", "extra", "MiB", "GFLOP"]
    assert text[2].split()[:2] == ["floor", "1.00"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tokens", "32", "--sweep-tokens", "64"], ["either --tokens or --sweep-tokens"]),
        (["--top-k", "301"], ["top-k is 301", "at most vocab, 300"]),
        (["--figure", "no/such/folder/loss.png"], ["--figure no/such/folder/loss.png", "no folder no/such/folder"]),
        (["--figure", "."], ["--figure . is a folder: name a file in it"]),
        (["--device", "tpu"], ["device is 'tpu'", "auto, cpu, cuda"]),
    ],
)
def test_bad_options(options: list[str], words: list[str]) -> None:
    one_error_line(warm("bench", "loss", *SIZES, *options), *words)


def test_help() -> None:
    """Within a terminal of 80 columns, without a sentence cut short."""
    for command in (["bench"], ["bench", "loss"]):
        done = succeed(warm(*command, "--help", env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"}))
        lines = done.stdout.splitlines()
        assert max(map(len, lines)) <= 80
        assert not [line for line in lines if line.endswith("...") and not line.startswith("Usage: ")], done.stdout
