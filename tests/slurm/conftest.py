"""One cluster for all tests of this folder, and a tiny GPT-OSS with its teacher, samples and cache."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.assets import succeed, tiny_recipe
from tests.models_oracles import tiny_gpt_oss_folder
from tests.slurm.cluster import Cluster, missing
from tests.slurm.runs import SAVE, STEPS
from tests.warm import warm


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The daemons, stopped whatever comes."""
    reason = missing()
    if reason and os.environ.get("KD_REQUIRE_SLURM"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
    home = Path(tempfile.mkdtemp(prefix="kd-slurm-", dir="/tmp"))  # short: it holds a socket
    (home / "work").mkdir()
    found = Cluster(home, home / "work")
    try:
        found.control("start", "2", "8", str(18100 + os.getpid() % 1000 * 4))
        yield found
    finally:
        found.control("stop")
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(scope="session")
def recipe(cluster: Cluster) -> Path:
    """A recipe for two nodes of one rank, with its teacher, student, samples and cache."""
    folder = cluster.folder / "tiny"
    teacher, student = (tiny_gpt_oss_folder(folder / f"hf_{seed}", seed) for seed in (12, 13))
    path = tiny_recipe(
        folder,
        data={"train_tokens": 48 * 16, "heldout_tokens": 48 * 4},
        teacher={"model": teacher.model_dump(mode="json"), "capture": {"rows_per_shard": 5}},
        student={
            "from_teacher": None,
            "model": student.model_dump(mode="json"),
            "checkpoint": str(folder / "student"),
        },
        training={"global_batch_size": 2, "train_iters": STEPS, "threads": 1},
        checkpoint={"save_interval": SAVE},
        optimizer={"lr_warmup_iters": 0},
    )
    for command in (("convert", "import"), ("convert", "import", "--role=student"), ("prepare",), ("capture",)):
        succeed(warm(*command, path))
    text = path.read_text().replace("nodes: 1", "nodes: 2")
    path.write_text(text)
    return path
