"""An S3 server on loopback for tests: moto's, in a process of its own, with one bucket."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

BUCKET = "bucket"
_SERVE = """
import logging, sys
from moto.moto_server.threaded_moto_server import ThreadedMotoServer
log = logging.getLogger("werkzeug")
log.setLevel(logging.INFO if len(sys.argv) > 1 else logging.ERROR)
log.addHandler(logging.FileHandler(sys.argv[1]) if len(sys.argv) > 1 else logging.NullHandler())
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def object_server(log: Path | None = None) -> Iterator[dict[str, str]]:
    """Yields the environment in which ``s3://bucket`` is found; the server ends with the block.

    Args:
        log: a file that gets a line for each request: ``… "GET /bucket/name HTTP/1.1" 200 -``.
    """
    command = [sys.executable, "-c", _SERVE, *([] if log is None else [str(log)])]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{int(server.stdout.readline())}"
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=30).close()
        yield {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }
    finally:
        server.kill()
        server.communicate()
