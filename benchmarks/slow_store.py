"""``python -m benchmarks.slow_store DIRECTORY RATE``: an HTTP server of a directory that gives ``RATE`` bytes a second
to all that read together, as a store far away does. Says its port as a line of JSON."""

from __future__ import annotations

import http.server
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

PIECE: Final = 256 * 1024
IDLE_S: Final = 60.0
"""A connection on which nothing is asked for so long is closed."""


class Store(http.server.ThreadingHTTPServer):
    """One ``rate`` for all connections, which may be set anew."""

    daemon_threads = True

    def __init__(self, directory: Path, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.directory = directory
        self.rate = rate
        self._free = time.monotonic()
        self._lock = threading.Lock()

    def wait_for(self, nbytes: int) -> None:
        """Until it is their turn."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self.rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client may go away."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Store
    protocol_version = "HTTP/1.1"
    timeout = IDLE_S

    def log_message(self, format: str, *arguments: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.server.directory / self.path.partition("?")[0].strip("/")
        if not path.is_file():
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        size = path.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(asked[1]), min(int(asked[2]), size - 1)) if asked else (0, size - 1)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        if body:
            self._send(path, first, last + 1)

    def _send(self, path: Path, at: int, end: int) -> None:
        with path.open("rb") as file:
            while at < end:
                count = min(PIECE, end - at)
                self.server.wait_for(count)
                at += self.connection.sendfile(file, at, count)


def main() -> None:
    """Serve until it is ended."""
    with Store(Path(sys.argv[1]), float(sys.argv[2])) as server:
        sys.stdout.write(json.dumps({"port": server.server_port}) + "\n")
        sys.stdout.flush()
        server.serve_forever()


if __name__ == "__main__":
    main()
