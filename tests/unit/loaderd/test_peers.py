"""One node's loader reads from another's: from its DRAM, its store, its SSD tier, with the token and not without."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from sllm_loaderd.peer import server
from sllm_loaderd.peer.exports import Exports
from sllm_loaderd.peer.signature import WINDOW_S, Asked, address_of, authorization
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import DigestMismatch, Forbidden, ModelNotFound, SllmError, Unavailable
from sllm_runtime.protocol.loader import CONVERT_NEVER
from tests.fixtures.loaderd import LoaderProcess, loaded, loaderd, numbers_model, same, small_checkpoint
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.invoker.test_no_descriptors import no_descriptors

WAIT = GIVE_UP_S
TOKEN = "a token of this cluster"


@contextlib.asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[LoaderProcess, int]]:
    port = free_port()
    async with loaderd(directory, peer_listen=f"127.0.0.1:{port}") as daemon:
        yield daemon, port


@pytest.fixture(autouse=True)
def _token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLLM_PEER_TOKEN", TOKEN)


def signed(path: str, address: Any, *, token: str = TOKEN, span: str = "", ago_s: float = 0.0) -> str:
    return authorization(token, Asked("GET", path, span, address_of(address)), time.time() - ago_s)


def ask(port: int, path: str, token: str | None = TOKEN, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)
    try:
        if token is not None and "Authorization" not in headers:
            shown = signed(path, ("127.0.0.1", port), token=token, span=headers.get("Range", ""))
            headers["Authorization"] = shown
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

        async def given_back() -> bool:
            pool = (await one.control.status()).pool
            return not (pool.used or pool.retiring)

        await until(given_back, what="what was lent comes back")
        await two.control.evict(digest)
        with pytest.raises(SllmError, match="not on this node"):
            await loaded(two, digest)


async def test_a_peer_that_nothing_comes_from_is_asked_for_one_chunk_of_a_model_that_others_have(
    tmp_path: Path,
) -> None:
    """It is cut off from this node alone, or large packets vanish on the way: each chunk took all of its reader's
    patience."""
    checkpoint, digest = small_checkpoint(tmp_path / "model", layers=16)
    arrays = numbers_model(tmp_path / "again", layers=16)
    shutil.copytree(checkpoint, tmp_path / "peer" / "models" / digest.removeprefix("sha256:"))
    with range_server(tmp_path / "peer") as peer, range_server(tmp_path / "model") as origin:
        async with loaderd(tmp_path / "two", ssd_bytes=0, remote_threads=1) as two:
            assert (await two.control.register(f"{origin.url}/checkpoint")).model == digest
            assert (await two.control.register(f"peer://127.0.0.1:{peer.server_port}/{digest}")).model == digest
            peer.script.extend(["cut 0"] * 1000)
            asked = len(peer.ranges)
            same(await loaded(two, digest), arrays)
            assert len(set(peer.ranges[asked:])) == 1
            asked = len(peer.ranges)
            await two.control.evict(digest)
            origin.script.extend(["cut 0"] * 1000)
            with pytest.raises(Unavailable):  # it is asked where nobody else gives it
                await loaded(two, digest, "another")
            assert len(peer.ranges) > asked


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
        index, here = f"{base}/index.json", ("127.0.0.1", port)
        for shown, why in (
            (f"Bearer {TOKEN}", b"this version"),
            (signed(index, ("127.0.0.2", port)), b"another address"),
            (signed(index, ("127.0.0.1", port + 1)), b"another address"),
            (signed(index, here, span="bytes=0-9"), b"another token"),
            (signed(f"{base}/{partition_name(0)}", here), b"another token"),
            (signed(index, here, ago_s=WINDOW_S + 5), b"s ago by this node's clock"),
            (signed(index, here, ago_s=-WINDOW_S - 5), b"s ahead of this node's clock"),
        ):
            status, said = await asyncio.to_thread(ask, port, index, Authorization=shown)
            assert (status, why in said) == (401, True), said
        none = f"/models/{'0' * 64}/index.json"
        inside = ("../../lock", "partition_1.bin", "none", "index.json/..")
        for path in (*(f"{base}/{name}" for name in inside), "/", "/models/", "/models/../lock/index.json", none):
            assert (await asyncio.to_thread(ask, port, path))[0] == 404
        changed = await asyncio.to_thread(ask, port, f"{base}/index.json", If_Match='"x"')
        assert changed[0] == 412
        beyond = await asyncio.to_thread(ask, port, f"{base}/index.json", Range="bytes=99999999-")
        assert beyond[0] == 416


async def test_who_shows_no_token_keeps_out_nobody(tmp_path: Path) -> None:
    """However many connections it makes, and whatever it says on them."""
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    index = f"/models/{digest.removeprefix('sha256:')}/index.json"
    async with serving(tmp_path / "one") as (one, port):
        await one.control.register(str(checkpoint))
        with contextlib.ExitStack() as strangers:
            for _ in range(2 * (server._MOST_PEERS + server._MOST_STRANGERS)):
                stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT))
                stranger.sendall(b"GET / HTTP/1.1\r\nX: ")
            assert (await asyncio.to_thread(ask, port, index))[0] == 200


@contextlib.contextmanager
def in_this_process() -> Iterator[server.PeerServer]:
    """A server that has no model."""
    none: Any = SimpleNamespace(size=_has_none)
    running = server.PeerServer(("127.0.0.1", 0), TOKEN, none)
    running.start()
    try:
        yield running
    finally:
        running.close()


def _has_none(digest: str, name: str) -> int:
    raise ModelNotFound(digest)


async def test_who_talks_without_end_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_STRANGE_S", 0.1)
    with in_this_process() as running, socket.create_connection(("127.0.0.1", running.server_address[1])) as slow:
        slow.setblocking(False)

        def hung_up() -> bool:
            try:
                slow.send(b"x")
                return not slow.recv(1)
            except BlockingIOError:
                return False
            except OSError:
                return True

        await until(hung_up, what="its time is over")


def test_one_peer_too_many_is_asked_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_PEERS", 1)
    path = f"/models/{'0' * 64}/index.json"
    with in_this_process() as running:
        port = running.server_address[1]
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT)) as first:
            for _ in range(2):  # it is one all the while
                first.request("GET", path, headers={"Authorization": signed(path, ("127.0.0.1", port))})
                answer = first.getresponse()
                assert (answer.status, answer.read()) == (404, f"sha256:{'0' * 64}".encode())
            assert ask(port, path)[0] == 503


async def test_the_place_of_a_peer_that_has_gone_is_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_PEERS", 1)
    path = f"/models/{'0' * 64}/index.json"
    with in_this_process() as running:
        port = running.server_address[1]
        for _ in range(3):  # the server may be about to hear that the last one has gone
            await until(lambda: ask(port, path)[0] == 404, what="it is served")


async def test_of_too_many_strangers_the_oldest_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MOST_STRANGERS", 2)
    with in_this_process() as running, contextlib.ExitStack() as opened:
        first, second, third = (
            opened.enter_context(socket.create_connection(("127.0.0.1", running.server_address[1]), timeout=WAIT))
            for _ in range(3)
        )
        assert await asyncio.to_thread(first.recv, 1) == b""
        for other in (second, third):
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(1)


async def test_whom_a_caller_names_as_a_peer_learns_nothing_that_opens_a_node(tmp_path: Path) -> None:
    """Neither the token, nor a request that another node would answer."""
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    heard = list[bytes]()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    stranger = await asyncio.start_server(listen, "127.0.0.1", 0)
    own = stranger.sockets[0].getsockname()[1]
    async with stranger, serving(tmp_path / "one") as (one, port), loaderd(tmp_path / "two") as two:
        await one.control.register(str(checkpoint))
        with pytest.raises(ModelNotFound):
            await two.control.register(f"peer://127.0.0.1:{own}/{digest}")
        assert TOKEN.encode() not in b"".join(heard)
        first, *lines = heard[0].decode().split("\r\n")
        path = first.split()[1]
        assert path.endswith("/index.json")
        shown = next(line.partition(": ")[2] for line in lines if line.startswith("Authorization"))
        assert (await asyncio.to_thread(ask, port, path))[0] == 200
        status, said = await asyncio.to_thread(ask, port, path, Authorization=shown)
        assert (status, b"another address" in said) == (401, True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("::ffff:10.0.0.5", 7000, 0, 0), ("10.0.0.5", 7000)),
        (("fe80::1%eth0", 7000, 0, 2), ("fe80::1", 7000, 0, 3)),
    ],
)
def test_both_ends_call_an_address_the_same(one: Any, other: Any) -> None:
    assert address_of(one) == address_of(other)


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
            peer.sendall(f"GET {path} HTTP/1.1\r\nAuthorization: {signed(path, peer.getpeername())}\r\n\r\n".encode())
            assert peer.recv(100).startswith(b"HTTP/1.1 200")
            one.process.terminate()
            assert await asyncio.to_thread(one.process.wait, WAIT / 2) == 0


def test_a_server_that_had_no_thread_for_the_last_peer_stops_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if "process_request_thread" in thread.name:
            raise RuntimeError("can't start new thread")
        real(thread)

    with in_this_process() as running:
        monkeypatch.setattr(threading.Thread, "start", start)
        with socket.create_connection(("127.0.0.1", running.server_address[1]), timeout=WAIT) as peer:
            assert peer.recv(1) == b"", "it is hung up on"
        monkeypatch.undo()


def test_no_resolver_is_asked_for_the_name_of_what_it_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is silent, as behind many a firewall, was waited for at each start of loaderd: 10 s."""
    asked: list[str] = []

    def silent(name: str) -> Any:
        asked.append(name)
        raise socket.herror

    monkeypatch.setattr(socket, "gethostbyaddr", silent)
    with in_this_process():
        assert not asked


def test_without_descriptors_it_waits_for_some(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is heard when there are some. Until then it does not ask again without a pause, which would take a
    processor, and Python's lock, from all that this loader loads."""
    tries, accept = 0, http.server.ThreadingHTTPServer.get_request

    def counted(self: http.server.ThreadingHTTPServer) -> Any:
        nonlocal tries
        tries += 1
        return accept(self)

    monkeypatch.setattr(http.server.ThreadingHTTPServer, "get_request", counted)
    served = server.PeerServer(("127.0.0.1", 0), TOKEN, Exports(cast(Any, None), cast(Any, None), cast(Any, None)))
    served.start()
    try:
        with socket.socket() as waits:
            with no_descriptors():
                waits.connect(served.server_address)
                time.sleep(0.5)
            waits.sendall(b"GET / HTTP/1.1\r\n\r\n")
            waits.settimeout(WAIT)
            assert waits.recv(100).startswith(b"HTTP/1.1 401")
        assert 1 < tries < 50, f"it tried {tries} times within half a second"
    finally:
        served.close()
