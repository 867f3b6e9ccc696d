"""Capture, verify and train with the cache in an object store: a real S3 server on loopback."""

from __future__ import annotations

import json
from pathlib import Path

from tests.assets import succeed
from tests.e2e.road import captured_road, one_error_line
from tests.unit.cache_object_server import BUCKET, object_server
from tests.warm import warm


def test_the_road_by_way_of_an_object_store(tmp_path: Path) -> None:
    road = captured_road()
    recipe, url = road / "recipe.yaml", f"s3://{BUCKET}/caches/tiny"
    with object_server() as server:
        missing = warm("train", recipe, f"teacher.cache={url}", f"run_dir={tmp_path / 'none'}", env=server)
        one_error_line(missing, url, "is not a cache")
        done = warm("capture", recipe, f"teacher.cache={url}", "--json", env=server)
        assert json.loads(succeed(done).stdout)["rows_captured"] == 60
        again = warm("capture", recipe, f"teacher.cache={url}", "--json", env=server)
        assert json.loads(succeed(again).stdout)["rows_captured"] == 0
        report = json.loads(succeed(warm("cache", "verify", url, "--level", "deep", "--json", env=server)).stdout)
        assert report["ok"] and report["rows_committed"] == 60 and report["orphans"] == []
        drift = json.loads(succeed(warm("cache", "drift", url, road / "cache", "--json", env=server)).stdout)
        assert drift["kl_max"] < 1e-6 and drift["rows"] == 60
        train = warm(
            "train", recipe, f"teacher.cache={url}", f"run_dir={tmp_path / 'run'}", "training.train_iters=3", "--json",
            env=server,
        )  # fmt: skip
        assert json.loads(succeed(train).stdout)["finished"]
