"""The store that figure 3 reads its second model from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.slow_store import PIECE, Store
from tests.fixtures.waiting import GIVE_UP_S

DATA = bytes(range(256)) * (2 * PIECE // 256) + b"end"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "b").write_bytes(DATA)
    with Store(tmp_path, rate=1e9) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join(GIVE_UP_S)


def test_a_range_and_the_whole(url: str) -> None:
    with httpx.Client(base_url=url, verify=False) as client:
        part = client.get("/b", headers={"Range": f"bytes=3-{PIECE + 9}"})
        assert (part.status_code, part.content) == (206, DATA[3 : PIECE + 10])
        assert part.headers["Content-Range"] == f"bytes 3-{PIECE + 9}/{len(DATA)}"
        assert client.get("/b").content == DATA
        assert client.head("/b").headers["Content-Length"] == str(len(DATA))
        assert client.get("/other").status_code == 404
