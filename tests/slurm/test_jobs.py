"""Jobs of a real SLURM, with the scripts of launch/ as users submit them."""

from __future__ import annotations

from pathlib import Path

from tests.slurm.cluster import Cluster


def test_first(cluster: Cluster, recipe: Path) -> None:
    job = cluster.submit("job.sh", recipe)
    print(job.ended(), job.log)
    for f in cluster.folder.rglob("node_*.log"):
        print(f, f.read_text())
    print(job.facts)
    assert 0
