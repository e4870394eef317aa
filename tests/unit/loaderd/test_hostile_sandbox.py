"""A sandbox that says what no right sandbox says harms itself alone: the daemon serves the others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from sllm_loaderd.daemon.sandbox import Rights, SandboxConnection
from sllm_loaderd.pool import ChunkPool
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.loader import CONVERT_NEVER, Adopt, Cancel, GetStatus, Grant, Hello, Load, Message, Stored
from tests.fixtures.loaderd import SMALL_CHUNK, LoaderProcess, loaderd, numbers_model, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until

WAIT = GIVE_UP_S
HELLO = pack(Hello())


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[LoaderProcess]:
    async with loaderd(tmp_path, fake_devices="1x2MiB@2GB/s") as started:
        yield started


@pytest.fixture
async def model(daemon: LoaderProcess, tmp_path: Path) -> str:
    return (await daemon.control.register(str(small_checkpoint(tmp_path / "model")[0]))).model


@contextlib.contextmanager
def raw(fd: int) -> Iterator[socket.socket]:
    """A sandbox's end of its connection, greeted."""
    with socket.socket(fileno=fd) as sock:
        sock.settimeout(WAIT)
        sock.sendall(framed(HELLO))
        assert sock.recv(4096)
        yield sock


def framed(payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + payload


def to_the_end(sock: socket.socket) -> bytes:
    heard = b""
    while part := sock.recv(65536):
        heard += part
    return heard


def descriptors(daemon: LoaderProcess) -> int:
    return psutil.Process(daemon.process.pid).num_fds()


async def test_a_message_nested_too_deeply_does_not_end_the_daemon(daemon: LoaderProcess, model: str) -> None:
    with raw(await daemon.control.grant("w", model)) as sock:
        nested = b"\x83\xa4type\xa6Cancel\xa7request\x01\xa1z" + b"\x91" * 400_000 + b"\xc0"
        sock.sendall(framed(nested))
        assert b"protocol_error" in await asyncio.to_thread(to_the_end, sock)
    assert await daemon.control.models() == (model,)


async def test_what_only_the_invoker_may_say_ends_the_connection(daemon: LoaderProcess, model: str) -> None:
    """Above all a sandbox brings no chunk: it may have kept a writable mapping from before the seal."""
    adopt = Adopt(
        request=1, model=model, partition=0, chunk_bytes=SMALL_CHUNK, numbers=(0,), ids=(1,), holders=("w",), fds=0
    )
    said: tuple[Message, ...] = (
        adopt,
        Stored(batch=1),
        Grant(request=1, holder="other", model=model),
        GetStatus(request=1),
    )
    for message in said:
        with raw(await daemon.control.grant("w", model)) as sock:
            sock.sendall(framed(pack(message)))
            assert b"protocol_error" in await asyncio.to_thread(to_the_end, sock), message
    assert not (await daemon.control.status()).resident


async def test_loads_to_a_device_again_and_again_take_its_memory_once(daemon: LoaderProcess, model: str) -> None:
    with raw(await daemon.control.grant("w", model)) as sock:
        done = 0
        for number in range(1, 40):
            sock.sendall(framed(pack(Load(request=number, device="fake:0"))))
            heard = b""
            while b"Done" not in heard:
                part = await asyncio.to_thread(sock.recv, 65536)
                assert part, "the connection goes on"
                heard += part
            done += 1
        (device,) = (await daemon.control.status()).devices
        assert (done, device.used) == (39, device.limit)
    await daemon.control.gone("w")
    assert (await daemon.control.status()).devices[0].used == 0


async def test_descriptors_from_a_sandbox_do_not_stay_open(daemon: LoaderProcess, model: str) -> None:
    with raw(await daemon.control.grant("w", model)) as sock:
        await daemon.control.status()
        before = descriptors(daemon)
        null = os.open(os.devnull, os.O_RDONLY)
        message = framed(pack(Cancel(request=1)))
        for _ in range(5):
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(sock, [message], [null] * 200)
        os.close(null)
        await until(lambda: descriptors(daemon) < before, what="the connection was closed with all that came")
    assert await daemon.control.models() == (model,)


async def test_answers_that_a_sandbox_does_not_take_hold_few_descriptors(daemon: LoaderProcess, model: str) -> None:
    with raw(await daemon.control.grant("w", model)) as sock:
        before, most = descriptors(daemon), 0
        asking = threading.Thread(target=_ask, args=(sock, 20_000), daemon=True)
        asking.start()
        until_ = time.monotonic() + 2.0
        while time.monotonic() < until_:
            await daemon.control.status()
            most = max(most, descriptors(daemon))
            await asyncio.sleep(0.02)
        assert most - before < 100
        sock.shutdown(socket.SHUT_RDWR)
        await asyncio.to_thread(asking.join, WAIT)
    assert await daemon.control.models() == (model,)


def _ask(sock: socket.socket, times: int) -> None:
    with contextlib.suppress(OSError):
        for number in range(times):
            sock.sendall(framed(pack(Load(request=number + 1))))


FLOOD = """
import socket, sys
sock = socket.socket(fileno=int(sys.argv[1]))
data = bytes.fromhex(sys.argv[2]) * 2000
for _ in range(20):
    sock.sendall(data)
print("talking", flush=True)
while True:
    sock.sendall(data)
"""


async def test_a_sandbox_that_never_stops_talking_holds_up_nobody(daemon: LoaderProcess, model: str) -> None:
    with raw(await daemon.control.grant("w", model)) as sock:
        sock.setblocking(True)
        words = (sys.executable, "-c", FLOOD, str(sock.fileno()), framed(pack(Cancel(request=7))).hex())
        talker = await asyncio.create_subprocess_exec(*words, pass_fds=[sock.fileno()], stdout=subprocess.PIPE)
        try:
            assert talker.stdout is not None
            async with asyncio.timeout(WAIT):
                await talker.stdout.readline()
            async with asyncio.timeout(GIVE_UP_S):
                for _ in range(5):
                    await daemon.control.status()
        finally:
            talker.kill()
            await talker.wait()


async def test_a_load_that_names_blocks_again_and_again_is_refused(daemon: LoaderProcess, model: str) -> None:
    with raw(await daemon.control.grant("w", model)) as sock:
        sock.sendall(framed(pack(Load(request=1, blocks=((0, 3),) * 100_000))))
        heard = b""
        while b"name each once" not in heard:
            part = await asyncio.to_thread(sock.recv, 65536)
            assert part
            heard += part
    assert await daemon.control.models() == (model,)


async def test_an_adapter_that_is_given_up_and_asked_for_again_comes_for_nobody(
    daemon: LoaderProcess, model: str
) -> None:
    """A load has its number until it has ended: another one under it could not be cancelled, nor ended with the
    sandbox."""
    lacking, running = "sha256:" + "0" * 64, psutil.Process(daemon.process.pid)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # connections are made, and nobody answers
        sources = {lacking: (f"http://127.0.0.1:{silent.getsockname()[1]}/slow",)}
        fd = await daemon.control.grant("w", model, adapters=(lacking,), sources=sources)
        with raw(fd) as sock:
            sock.sendall(framed(pack(Load(request=5, model=lacking))))
            await until(running.children, what="it comes")
            (fetching,) = running.children()
            fetching.suspend()  # so that it takes its time to end
            for message in (Cancel(request=5), Load(request=5, model=lacking)):
                sock.sendall(framed(pack(message)))
            heard = b""
            while b"load 5 is under way already" not in heard:
                part = await asyncio.to_thread(sock.recv, 65536)
                assert part, "the connection goes on"
                heard += part
            assert b"the load was cancelled" in heard
            with contextlib.suppress(psutil.NoSuchProcess):  # loaderd may have lost its patience by now, and killed it
                fetching.resume()
            await until(lambda: not running.children(), what="it ends")
            sock.sendall(framed(pack(Load(request=6, model=lacking))))
            await until(running.children, what="it comes again")
        await until(lambda: not running.children(), what="it ends with the sandbox")
    assert await daemon.control.models() == (model,)


async def test_loads_of_adapters_that_come_first_count_as_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 at once: else a sandbox that waits for 64 of each adapter it may have has as many thousands under way."""
    lacking, refused = [f"sha256:{number:064x}" for number in range(3)], list[int]()

    async def bring(*_: object) -> None:
        """It comes in a moment."""

    async def load(*_: object, **__: object) -> object:
        return SimpleNamespace(start=lambda: None, cancel=lambda: None)

    service: Any = SimpleNamespace(
        settings=SimpleNamespace(node="n1"), lacks=lacking.__contains__, bring=bring, load=load, forget=lambda _: None
    )
    ours, theirs = socket.socketpair()
    rights = Rights("w", "sha256:m", adapters=tuple(lacking), sources={digest: ("/a",) for digest in lacking})
    with theirs, contextlib.closing(AsyncWire(ours, max_fds=0)) as wire:
        sandbox = SandboxConnection(wire, rights, service, lambda _: None)
        monkeypatch.setattr(sandbox, "_send_memory", lambda number, loading: None)
        monkeypatch.setattr(sandbox._connection, "fail", lambda number, error: refused.append(number))
        async with asyncio.TaskGroup() as group:
            for number in range(3 * 40):
                await sandbox._handle(Load(request=number, model=lacking[number // 40]), group)
                await asyncio.sleep(0)
        assert sorted(sandbox._loads) == list(range(64))
        assert refused == list(range(64, 120))


def test_a_pool_outlives_a_moment_without_descriptors() -> None:
    size, soft, hard = 16384, *resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
    taken: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        pool = ChunkPool(size, 4 * size, 2 * size)
        with pytest.raises(OSError, match="Too many open files"):
            pool.allocate(1)
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        assert pool.status().free == 4 * size
        pool.free(pool.allocate(1))
        assert len(pool.allocate(2)) == 2  # wakes the thread that makes chunks ahead
        assert pool.wait_prefaulted(2 * size, WAIT)
    finally:
        pool.close()


async def test_a_model_whose_file_becomes_a_pipe_holds_up_nobody(tmp_path: Path) -> None:
    """Who may write to a model's directory (its owner's own function, say) puts a pipe in a file's place: to open one
    takes as long as nobody writes to it, and the threads of a disk are everybody's."""
    sources = [tmp_path / f"m{number}" for number in range(8)]
    for number, source in enumerate((*sources, tmp_path / "other")):
        numbers_model(source, seed=number)
    pipes = [source / "model.safetensors" for source in sources]
    async with loaderd(tmp_path, chunk_bytes=16 * 2**20, pool_bytes=2**28) as daemon:
        theirs = [(await daemon.control.register(str(source), convert=CONVERT_NEVER)).model for source in sources]
        other = (await daemon.control.register(str(tmp_path / "other"), convert=CONVERT_NEVER)).model
        for pipe in pipes:
            pipe.unlink()
            os.mkfifo(pipe)
        loads = [asyncio.create_task(daemon.control.prefetch(digest)) for digest in theirs]
        try:
            await asyncio.sleep(0.5)
            async with asyncio.timeout(10):
                await daemon.control.prefetch(other)
                ends = await asyncio.gather(*loads, return_exceptions=True)
            assert all(isinstance(end, SllmError) for end in ends), ends
        finally:
            with contextlib.ExitStack() as writers:  # who waits for one goes on, and sees an end
                for pipe in pipes:
                    writers.callback(os.close, os.open(pipe, os.O_RDWR))
                await asyncio.sleep(0.5)
            await asyncio.gather(*loads, return_exceptions=True)


async def test_a_model_with_a_pipe_among_its_files_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "m"
    numbers_model(source)
    pipe = source / "model-00002-of-00002.safetensors"
    (source / "model.safetensors").rename(source / "model-00001-of-00002.safetensors")
    os.mkfifo(pipe)
    names = {"embed.weight": "model-00001-of-00002.safetensors", "head.weight": pipe.name}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    async with loaderd(tmp_path) as daemon:
        with pytest.raises(SllmError) as told:
            async with asyncio.timeout(15):
                await daemon.control.register(str(source))
        assert told.value.field == pipe.name
