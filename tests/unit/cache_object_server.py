"""An S3 server on loopback for tests: moto's, in a process of its own, with one bucket."""

from __future__ import annotations

import http.client
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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


@contextmanager
def lossy_connection(endpoint: str, lose: Callable[[str, str], bool]) -> Iterator[str]:
    """An endpoint that hands requests on to another one, and drops the connection instead of some answers.

    Args:
        lose: asked with method and path of each request after the server has done it; may be called from threads.
    """
    host = endpoint.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            server = http.client.HTTPConnection(host, timeout=60)
            server.request(self.command, self.path, body, dict(self.headers))
            answer = server.getresponse()
            data = answer.read()
            server.close()
            if lose(self.command, self.path.split("?")[0]):
                self.close_connection = True
                return
            self.send_response(answer.status)
            length = answer.headers.get("Content-Length") if self.command == "HEAD" else None
            for name, value in answer.headers.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length or str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _pass_on  # noqa: N815, the names that the server calls

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
