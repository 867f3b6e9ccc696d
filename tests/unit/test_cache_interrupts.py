"""Ctrl-C while an object store does not answer: its library hears nothing for minutes, and still the process ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("obstore")

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "request": "open_storage(URL).exists('x')",
    "together": "storage = open_storage(URL); storage.together([lambda: storage.read('x', 1)] * 20)",
    "listing": "open_storage(URL).files()",
    "in_another_thread": """
import threading
threading.Thread(target=lambda: open_storage(URL).exists("x"), daemon=True).start()
threading.Event().wait()
""",
    "writer": """
from megatron_kd.cache.store import Cache
from megatron_kd.teacher.shard_writer import ShardWriter
from tests.unit.cache_rows import make_manifest, make_row, rank_table
print("ready", flush=True)
with ShardWriter(Cache(open_storage(URL), make_manifest(2, 2), rank_table()), 1) as writer:
    writer.begin(0)
    while True:
        writer.put(make_row(0, 3))
""",
}


@pytest.fixture
def silent() -> Iterator[dict[str, str]]:
    """The environment of a store that takes connections and answers nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_interrupt_ends_the_process(silent: dict[str, str], name: str) -> None:
    program = (
        "from megatron_kd.cache.storage import open_storage\nURL = 's3://bucket/cache'\nopen_storage(URL)\n"
        + ("" if name == "writer" else "print('ready', flush=True)\n")
        + PROGRAMS[name]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        env=os.environ | silent | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.5)  # then it hangs
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGINT and said.splitlines()[-1] == "KeyboardInterrupt", said
    assert time.monotonic() - began < 15
