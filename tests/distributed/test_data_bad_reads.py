"""A row that turns bad while a run goes on ends all ranks at the same step; tensor-parallel ranks read equal bytes.

Each rank reads a copy of the cache of its own, as from the disk of its node, so that one rank alone can fail.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from megatron_kd.data.batches import Batch
from megatron_kd.data.sampler import SampleOrder
from megatron_kd.data.samples import SampleSet
from megatron_kd.data.steps import train_rows
from megatron_kd.testing import run_distributed
from tests.assets import steps_of, tiny_recipe
from tests.training_runs import Layout, Trainer, largest_difference, leave_layout, make_inputs, recipe_in

LAYOUTS = {2: [Layout(2, tp=2, sp=True), Layout(2)], 4: [Layout(4, tp=2)]}
ALL = [layout for layouts in LAYOUTS.values() for layout in layouts]
PAIRS = LAYOUTS[2]
# All within the first epoch of 100 rows: of short rows the reader keeps what it decoded, and would not look again.
STEPS, BAD_STEP, DAMAGED_AT, BAD_RANK = 24, 20, 3, 1
PATIENCE_S = 20.0


def damage(cache: Path, sample: int, *, truncate: bool = False) -> None:
    """Flips a bit of one row's values, or cuts them in half; a shard is a row here."""
    (file,) = cache.glob(f"shards/{sample:06d}-*/logprob_delta/c.0.0")
    if truncate:
        os.truncate(file, file.stat().st_size // 2)
        return
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    with open(file, "r+b") as opened:  # in place: the run has the file open
        opened.write(data)


def bytes_of(batch: Batch) -> str:
    """A hash over everything a batch holds."""
    assert batch.targets is not None
    tensors = [batch.tokens, batch.labels, batch.token_weights]
    tensors += [batch.targets.ids, batch.targets.logprobs, batch.targets.tail_logmass]
    digest = hashlib.sha256(str(batch.sample_ids).encode())
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def attempt(run: Any) -> dict[str, Any]:
    began = time.monotonic()
    try:
        outcome: tuple[str, str] = ("ended well", str(run()))
    except Exception as error:
        outcome = (type(error).__name__, str(error) if str(error) else traceback.format_exc())
    return {"outcome": outcome, "ended": time.monotonic(), "seconds": time.monotonic() - began}


def bad_row_in_training(rank: int, recipe: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    """Trains; once some steps are in the metrics, the row of a later step is damaged on one rank's disk."""
    from megatron_kd.training.loop import train

    cache = folder / f"cache_{rank}"
    shutil.copytree(recipe.parent / "cache", cache)
    leave_layout()
    loaded = recipe_in(
        recipe, layout, f"teacher.cache={cache}", f"run_dir={folder / 'run'}", f"training.train_iters={STEPS}"
    )
    samples = SampleSet(loaded.data.samples)
    order = SampleOrder(
        train_rows(samples, loaded.data.train_tokens), seed=loaded.seed, shuffle=True, global_batch_size=4
    )
    dp = layout.world // layout.tp
    bad = int(order.ids_for(BAD_STEP * 4, (BAD_RANK // layout.tp) % dp, dp, 1)[-1][0])
    damaged: list[int] = []

    def wait_and_damage() -> None:
        file = folder / "run/metrics.jsonl"
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if file.exists() and file.read_text().count('"loss/kd"') >= DAMAGED_AT:
                damage(cache, bad, truncate=layout.tp == 1)
                damaged.append(file.read_text().count('"loss/kd"'))
                return
            time.sleep(0.001)

    watcher = threading.Thread(target=wait_and_damage)
    if rank == BAD_RANK:
        watcher.start()
    found = {"bad": bad, **attempt(lambda: train(loaded, show_progress=False))}
    if rank == BAD_RANK:
        watcher.join()
    found["threads"] = [thread.name for thread in threading.enumerate() if thread.name.startswith("prefetch")]
    # With a good cache the run goes on from what was kept.
    leave_layout()
    good = recipe_in(
        recipe, layout, f"run_dir={folder / 'run'}", f"training.train_iters={STEPS}", "logging.log_interval=1"
    )
    found["stopped at"] = len(steps_of(folder / "run"))
    found["kept"] = sorted(path.name for path in (folder / "run/checkpoints").glob("iter_*"))
    found["resumed"] = train(good, show_progress=False).to_dict()
    return {**found, "damaged after": damaged}


def bad_row_in_evaluation(rank: int, recipe: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    from megatron_kd.training.evaluation_job import evaluate

    cache = folder / f"cache_{rank}"
    shutil.rmtree(cache)
    shutil.copytree(recipe.parent / "cache", cache)
    leave_layout()
    loaded = recipe_in(recipe, layout, f"teacher.cache={cache}", f"run_dir={folder / 'unused'}")
    heldout = SampleSet(loaded.data.samples).splits["heldout"]
    bad = heldout[4 * (layout.world // layout.tp) + (BAD_RANK // layout.tp)]  # behind what is read ahead at first
    if rank == BAD_RANK:
        damage(cache, bad)
    return {"bad": bad, **attempt(lambda: evaluate(loaded, None, show_progress=False))}


def refused_before_the_first_step(rank: int, recipe: Path, layout: Layout, folder: Path) -> dict[str, Any]:
    """On one rank's disk the tokens of one sample are others than when the cache was made; then a shard is missing."""
    from megatron_kd.training.loop import train

    found = {}
    for name in ("tokens", "hole"):
        samples, cache = folder / f"samples_{name}_{rank}", folder / f"cache_{name}_{rank}"
        shutil.copytree(recipe.parent / "samples", samples)
        shutil.copytree(recipe.parent / "cache", cache)
        if name == "tokens":
            # Seen by whichever rank's share it is.
            data = bytearray((samples / "tokens.npy").read_bytes())
            data[-4 * 48 * 8 + 4 * 5] ^= 1
            (samples / "tokens.npy").write_bytes(data)
        elif rank == BAD_RANK:
            (cache / "commits/000007.json").unlink()
        leave_layout()
        run_dir = folder / f"run_{name}"
        loaded = recipe_in(recipe, layout, f"teacher.cache={cache}", f"data.samples={samples}", f"run_dir={run_dir}")
        found[name] = {**attempt(lambda loaded=loaded: train(loaded, show_progress=False)), "began": run_dir.exists()}
    return found


def _rank(rank: int, world: int, recipe: Path, folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if world == 1:
        make_inputs(recipe_in(recipe, Layout(1)))
        found["curve"] = Trainer(recipe_in(recipe, Layout(1), f"training.train_iters={STEPS}")).curve(STEPS)
        return found
    for layout in LAYOUTS[world]:
        place = folder / str(layout)
        place.mkdir(exist_ok=True)
        reader = Trainer(recipe_in(recipe, layout))._reader
        found[str(layout)] = {
            "bytes": [bytes_of(batch) for step in range(4) for batch in reader(step)],
            "training": bad_row_in_training(rank, recipe, layout, place),
        }
        if layout in PAIRS:
            found[str(layout)]["evaluation"] = bad_row_in_evaluation(rank, recipe, layout, place)
            found[str(layout)]["refused"] = refused_before_the_first_step(rank, recipe, layout, place)
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_recipe(
        tmp_path_factory.mktemp("bad_reads"),
        data={"train_tokens": 4800},
        teacher={"capture": {"rows_per_shard": 1}},
        checkpoint={"save_interval": None},
        training={"train_iters": STEPS},
    )


@pytest.fixture(scope="module")
def found(recipe: Path) -> dict[str, Any]:
    folder = recipe.parent / "runs"
    folder.mkdir()
    (alone,) = run_distributed(_rank, 1, recipe, folder)
    result: dict[str, Any] = {"alone": alone["curve"], "runs": folder}
    for world in LAYOUTS:
        ranks = run_distributed(_rank, world, recipe, folder, timeout_s=300.0)
        result |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return result


@pytest.mark.parametrize("layout", ALL, ids=str)
def test_tensor_parallel_ranks_read_equal_bytes(found: dict[str, Any], layout: Layout) -> None:
    read = [rank["bytes"] for rank in found[str(layout)]]
    for rank, batches in enumerate(read):
        assert batches == read[rank - rank % layout.tp]
    assert len({tuple(batches) for batches in read}) == layout.world // layout.tp


def one_rank_says(ranks: list[dict[str, Any]], row: int, folder: Path) -> None:
    """The rank that failed names the row, the others say that one failed, and none waits for a timeout."""
    for number, rank in enumerate(ranks):
        kind, text = rank["outcome"]
        if number == BAD_RANK:
            assert kind == "CacheError", (kind, text)
            assert text.startswith(f"sample {row} of {folder / f'cache_{number}'} cannot be used"), text
            assert "cache verify" in text
        else:
            assert kind == "RemoteRankError" and "on another rank; its message says why" in text, (kind, text)
    ended = [rank["ended"] for rank in ranks]
    assert max(ended) - min(ended) < PATIENCE_S / 2


@pytest.mark.parametrize("layout", ALL, ids=str)
def test_a_row_that_turns_bad_in_training(found: dict[str, Any], layout: Layout) -> None:
    folder = found["runs"] / str(layout)
    ranks = [rank["training"] for rank in found[str(layout)]]
    one_rank_says(ranks, ranks[BAD_RANK]["bad"], folder)
    assert ranks[BAD_RANK]["damaged after"][0] >= DAMAGED_AT, "the run was under way"
    for rank in ranks:
        assert rank["threads"] == []
        assert DAMAGED_AT <= rank["stopped at"] <= BAD_STEP
        assert rank["kept"] == [f"iter_{rank['stopped at']:07d}"], "what was learnt before the bad row is kept"
        assert rank["resumed"]["resumed_from"] == rank["stopped at"] and rank["resumed"]["finished"]
    steps = steps_of(folder / "run")
    assert [step["iteration"] for step in steps] == list(range(1, STEPS + 1))
    assert largest_difference(found["alone"], steps) < 1e-4


@pytest.mark.parametrize("layout", PAIRS, ids=str)
def test_a_bad_row_in_evaluation(found: dict[str, Any], layout: Layout) -> None:
    ranks = [rank["evaluation"] for rank in found[str(layout)]]
    one_rank_says(ranks, ranks[BAD_RANK]["bad"], found["runs"] / str(layout))
    assert not (found["runs"] / str(layout) / "unused").exists()


@pytest.mark.parametrize("layout", PAIRS, ids=str)
@pytest.mark.parametrize(
    ("name", "words"),
    [("tokens", ["sample 102 ", "other tokens", "at position 5"]), ("hole", ["lacks samples 7", "capture"])],
)
def test_refused_before_the_first_step(found: dict[str, Any], layout: Layout, name: str, words: list[str]) -> None:
    outcomes = [rank["refused"][name]["outcome"] for rank in found[str(layout)]]
    (said,) = [text for kind, text in outcomes if kind in ("CacheError", "ForeignRowError")]
    assert all(word in said for word in words), said
    others = [text for kind, text in outcomes if kind == "RemoteRankError"]
    assert len(others) == layout.world - 1 and all("opening the data failed on another rank" in text for text in others)
    assert not any(rank["refused"][name]["began"] for rank in found[str(layout)])
