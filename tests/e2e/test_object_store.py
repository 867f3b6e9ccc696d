"""Capture, repair, clean, verify and train with the cache in an object store: a real S3 server on loopback."""

from __future__ import annotations

import json
from pathlib import Path

import obstore
import pytest
import yaml
from obstore.store import from_url

from megatron_kd.cache.verify import Level, verify
from megatron_kd.config import load_recipe
from tests.assets import succeed
from tests.e2e.road import captured_road, one_error_line
from tests.unit.cache_object_server import BUCKET, object_server
from tests.warm import start, warm


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


def test_two_ranks_repair_and_clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is the recipe's own; one shard loses an object and another a bit."""
    road, url = captured_road(), f"s3://{BUCKET}/caches/two"
    values = yaml.safe_load((road / "recipe.yaml").read_text())
    values["teacher"]["cache"] = url
    values["data"]["num_workers"] = 8
    values["cluster"]["gpus_per_node"] = 2
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    assert load_recipe(recipe).teacher.cache == url
    assert yaml.safe_load(succeed(warm("show", recipe)).stdout)["teacher"]["cache"] == url
    with object_server() as server:
        for name, value in server.items():
            monkeypatch.setenv(name, value)
        store = from_url(url)

        def get(name: str) -> bytes:
            return bytes(obstore.get(store, name).bytes())

        def capture(*more: str) -> dict[str, object]:
            first, second = start("capture", recipe, *more, "--json", ranks=2, env=server).wait()
            assert succeed(second).stdout == ""
            report: dict[str, object] = json.loads(succeed(first).stdout)
            return report

        def attempt(shard: int) -> str:
            return str(json.loads(get(f"commits/{shard:06d}.json"))["attempt"])

        def problems(level: Level) -> tuple[list[int], int]:
            found = verify(url, level)
            return found.damaged_shards, len(found.orphans)

        assert capture()["rows_captured"] == 60
        assert problems("deep") == ([], 0)
        obstore.delete(store, f"shards/{attempt(1)}/rank/c.0.0")
        flipped = bytearray(get(f"shards/{attempt(3)}/tokens/c.0"))
        flipped[30] ^= 1
        obstore.put(store, f"shards/{attempt(3)}/tokens/c.0", bytes(flipped))
        assert problems("inventory") == ([1], 0) and problems("crc") == ([1, 3], 0)
        refused, _ = start("capture", recipe, "--json", ranks=2, env=server).wait()
        one_error_line(refused, url, "shard 1 (samples 16–31) is damaged", "--repair")
        assert capture("--repair", "--part", "1/2")["rows_captured"] == 16
        assert problems("crc") == ([3], 1), "the other part is not looked at"
        assert capture("--repair")["rows_captured"] == 12
        assert problems("deep") == ([], 2)
        kept = json.loads(succeed(warm("cache", "clean", url, "--json", env=server)).stdout)
        assert kept["removed"] == [] and len(kept["kept"]) == 2
        cleaned = json.loads(succeed(warm("cache", "clean", url, "--idle-hours", "0", "--json", env=server)).stdout)
        assert len(cleaned["removed"]) == 2
        succeed(warm("cache", "verify", url, "--level", "deep", "--workers", "2", env=server))
        train = start(
            "train", recipe, f"run_dir={tmp_path / 'run'}", "training.train_iters=6", "--json", ranks=2, env=server
        )  # fmt: skip
        assert json.loads(succeed(train.wait()[0]).stdout)["finished"]
    local = [f"teacher.cache={road / 'cache'}", f"run_dir={tmp_path / 'local'}", "training.train_iters=6", "--json"]
    succeed(start("train", recipe, *local, ranks=2).wait()[0])
    curves = [
        [json.loads(line).get("loss/kd") for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("run", "local")
    ]
    assert curves[0] == curves[1] and len(curves[0]) >= 6
