"""One node's loader reads from another's: from its DRAM, its store, its SSD tier, with the token and not without."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import DigestMismatch, Forbidden, ModelNotFound, SllmError, Unavailable
from sllm_runtime.protocol.loader import CONVERT_NEVER
from tests.fixtures.loaderd import LoaderProcess, loaded, loaderd, numbers_model, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S

WAIT = GIVE_UP_S
TOKEN = "a token of this cluster"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[LoaderProcess, int]]:
    port = free_port()
    async with loaderd(directory, peer_listen=f"127.0.0.1:{port}") as daemon:
        yield daemon, port


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLLM_PEER_TOKEN", TOKEN)


def ask(port: int, path: str, token: str | None = TOKEN, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


async def test_a_model_goes_from_node_to_node(tmp_path: Path) -> None:
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    arrays = numbers_model(tmp_path / "again")
    async with serving(tmp_path / "one") as (one, port), loaderd(tmp_path / "two", ssd_bytes=0) as two:
        await one.control.register(str(checkpoint))
        info = await two.control.register(f"peer://127.0.0.1:{port}/{digest}")
        assert info.model == digest
        with_disk = await loaded(two, digest)
        await two.control.evict(digest)
        await one.control.prefetch(digest)
        (one.model_directory(digest) / partition_name(0)).unlink()  # only its memory is left
        with_memory = await loaded(two, digest)
        for found in (with_disk, with_memory):
            assert found.keys() == arrays.keys()
            for name, array in arrays.items():
                np.testing.assert_array_equal(found[name], array)
        assert f"peer 127.0.0.1:{port}" in {path.path for path in (await two.control.status()).paths}
        await one.control.evict(digest)
        deadline = time.monotonic() + WAIT
        while (pool := (await one.control.status()).pool).used or pool.retiring:
            assert time.monotonic() < deadline, "what was lent comes back"
            await asyncio.sleep(0.01)
        await two.control.evict(digest)
        with pytest.raises(SllmError, match="not on this node"):
            await loaded(two, digest)


async def test_what_one_node_loaded_as_it_was_another_takes_from_its_memory(tmp_path: Path) -> None:
    arrays = numbers_model(tmp_path / "model")
    port, sizes = free_port(), {"chunk_bytes": 16 * 2**20, "pool_bytes": 2**27}
    one_s: dict[str, Any] = {"peer_listen": f"127.0.0.1:{port}", **sizes}
    async with loaderd(tmp_path / "one", **one_s) as one, loaderd(tmp_path / "two", **dict[str, Any](sizes)) as two:
        info = await one.control.register(str(tmp_path / "model"), convert=CONVERT_NEVER)
        uri = f"peer://127.0.0.1:{port}/{info.model}"
        with pytest.raises(ModelNotFound):
            await two.control.register(uri)  # it is nowhere as a whole yet
        await one.control.prefetch(info.model)
        assert (await two.control.register(uri)).model == info.model
        found = await loaded(two, info.model)
        assert found.keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(found[name], array)


async def test_who_has_no_token_gets_nothing_and_who_has_gets_only_models(tmp_path: Path) -> None:
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    async with serving(tmp_path / "one") as (one, port):
        await one.control.register(str(checkpoint))
        base = f"/models/{digest.removeprefix('sha256:')}"
        whole = (checkpoint / partition_name(0)).read_bytes()
        assert await asyncio.to_thread(ask, port, f"{base}/{partition_name(0)}") == (200, whole)
        part = await asyncio.to_thread(ask, port, f"{base}/{partition_name(0)}", Range="bytes=70000-80000")
        assert part == (206, whole[70000:80001])
        for token in (None, "", "a token", TOKEN + "x"):
            assert (await asyncio.to_thread(ask, port, f"{base}/index.json", token))[0] == 401
        none = f"/models/{'0' * 64}/index.json"
        inside = ("../../lock", "partition_1.bin", "none", "index.json/..")
        for path in (*(f"{base}/{name}" for name in inside), "/", "/models/", "/models/../lock/index.json", none):
            assert (await asyncio.to_thread(ask, port, path))[0] == 404
        changed = await asyncio.to_thread(ask, port, f"{base}/index.json", If_Match='"x"')
        assert changed[0] == 412
        beyond = await asyncio.to_thread(ask, port, f"{base}/index.json", Range="bytes=99999999-")
        assert beyond[0] == 416


async def test_what_a_peer_refuses_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    async with serving(tmp_path / "one") as (one, port):
        await one.control.register(str(checkpoint))
        monkeypatch.setenv("SLLM_PEER_TOKEN", "another cluster's")
        async with loaderd(tmp_path / "two") as two:
            with pytest.raises(Forbidden, match="SLLM_PEER_TOKEN"):
                await two.control.register(f"peer://127.0.0.1:{port}/{digest}")
            monkeypatch.setenv("SLLM_PEER_TOKEN", TOKEN)
    async with serving(tmp_path / "three") as (three, port):
        with pytest.raises(ModelNotFound):
            await three.control.register(f"peer://127.0.0.1:{port}/{digest}")
        with pytest.raises((Unavailable, DigestMismatch)):
            await three.control.register(f"peer://127.0.0.1:9/{digest}")


async def test_stopping_ends_a_peer_that_reads_nothing(tmp_path: Path) -> None:
    checkpoint, digest = small_checkpoint(tmp_path / "model", rows=4096)
    async with serving(tmp_path / "one") as (one, port):
        await one.control.register(str(checkpoint))
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT) as peer:
            path = f"/models/{digest.removeprefix('sha256:')}/{partition_name(0)}"
            peer.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode())
            assert peer.recv(100).startswith(b"HTTP/1.1 200")
            one.process.terminate()
            assert await asyncio.to_thread(one.process.wait, WAIT / 2) == 0
