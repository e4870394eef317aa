"""A fork server that does not start: with a program in its place that ends, or says that it is ready."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from sllm_invoker import fork_server
from sllm_invoker.fork_server import STILLBORN, Born, ForkServer
from sllm_runtime.platform import oom_kills, wire
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.worker import FromZygote, Unborn, ZygoteReady
from tests.fixtures.waiting import until

PROGRAM = """
import socket, sys
from pathlib import Path
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.worker import FromZygote, ZygoteReady
if not Path(sys.argv[1]).exists():
    sys.exit("it lacks what it needs")
wire = BlockingWire(socket.socket(fileno=int(sys.argv[3])))
wire.send(codec.pack(FromZygote(ZygoteReady(import_s=0.1, python="3.x"))))
wire.receive_all()
wire.receive_all()
"""


async def spawn(server: ForkServer) -> str:
    """Why no worker comes of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(Unavailable) as caught:
        await server.spawn("one", theirs, 1, 2)
    return caught.value.message


async def test_who_waits_for_one_that_does_not_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once, and no longer when it has what it lacked: it is tried again and again."""
    monkeypatch.setattr(fork_server, "SPAWN_S", 0.2)
    monkeypatch.setattr(fork_server, "BACKOFF_S", (0.0, 0.1))
    needed, env = tmp_path / "needed", {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    argv = (sys.executable, "-c", PROGRAM, str(needed))
    server = ForkServer(env, argv=argv, on_exit=lambda _name, _exited: None)
    running = asyncio.create_task(server.run())
    try:
        async with asyncio.timeout(fork_server.READY_S / 2):
            why = await spawn(server)
        assert f"has ended {STILLBORN} times before it was ready: it ended before" in why
        needed.touch()
        await until(lambda: server.python)
        assert await spawn(server) == "the fork server made no worker within 0.2 s"
        needed.unlink()
        why = ""
        os.kill(server.pid, signal.SIGKILL)
        async with asyncio.timeout(fork_server.READY_S / 2):
            while "before it was ready" not in why:
                why = await spawn(server)
        assert f"has ended {STILLBORN} times" in why, "counted anew: it was ready meanwhile"
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_one_that_hangs_before_it_is_ready_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "READY_S", 0.3)
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    server = ForkServer(env, argv=("sh", "-c", "exec sleep 1000"), on_exit=lambda _name, _exited: None)
    running = asyncio.create_task(server.run())
    try:
        await until(lambda: server.pid)
        first = server.pid
        await until(lambda: server.pid not in (0, first), what="there is another one")
        await until(lambda: server._why, what="who waits is told")
        assert f"has ended {STILLBORN} times before it was ready: it was not ready within" in await spawn(server)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_a_worker_that_comes_when_nobody_waits_any_more_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its descriptor would stay for good: not even its end would free it."""
    server = ForkServer({}, on_exit=lambda _name, _exited: None)
    ours, theirs = socket.socketpair()
    server._wire, invokers = AsyncWire(ours), AsyncWire(theirs)
    server._settled.set()
    pidfds = [os.pidfd_open(os.getpid()) for _ in range(2)]
    invokers.fds.add(pidfds[:1])
    server._born("nobody", invokers)
    mine, workers = socket.socketpair()
    with mine, workers:
        spawning = asyncio.create_task(server.spawn("one", workers, 1, 2))
        await until(lambda: server._births, what="it waits")
        server._births["one"].set_result(Born(pidfds[1]))
        spawning.cancel()
        with pytest.raises(asyncio.CancelledError):
            await spawning
    for pidfd in pidfds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(pidfd)
    server._wire.close()
    invokers.close()


async def test_one_that_the_kernel_kills_for_memory_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container whose limit is too small for torch: it has no last words to look for."""
    kills = iter(range(1000))
    monkeypatch.setattr(oom_kills, "nearest", lambda: next(kills))
    monkeypatch.setattr(fork_server, "BACKOFF_S", (0.0,))
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    argv = (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    server = ForkServer(env, argv=argv, on_exit=lambda _name, _exited: None)
    running = asyncio.create_task(server.run())
    try:
        assert "lack of memory" in await spawn(server)
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_who_waits_for_a_worker_that_no_process_could_be_made_for_is_told() -> None:
    """As under a limit of processes that is reached; not after SPAWN_S, and with the reason."""
    server = ForkServer({}, on_exit=lambda _name, _exited: None)
    ours, theirs = socket.socketpair()
    mine, zygote = AsyncWire(ours), AsyncWire(theirs)
    zygote.send(codec.pack(FromZygote(ZygoteReady(import_s=0.1, python="3.x"))))
    listening = asyncio.create_task(server._listen(mine))
    server._wire = mine
    try:
        spawning = asyncio.create_task(spawn(server))
        await until(lambda: server._births, what="it waits")
        zygote.send(codec.pack(FromZygote(Unborn(sandbox="one", why="Resource temporarily unavailable"))))
        async with asyncio.timeout(5.0):
            assert "Resource temporarily unavailable" in await spawning
    finally:
        listening.cancel()
        await asyncio.wait([listening])
        mine.close()
        zygote.close()


async def test_one_that_nothing_can_be_sent_to_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lives, and its socket is open: nothing else would end it, and no start would ever come to it."""
    monkeypatch.setattr(wire, "SHORT_S", 0.0)
    env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    argv = (sys.executable, "-c", PROGRAM, str(tmp_path))
    server = ForkServer(env, argv=argv, on_exit=lambda _name, _exited: None)
    running = asyncio.create_task(server.run())
    try:
        await until(lambda: server.python)
        first = server.pid
        with monkeypatch.context() as short:
            short.setattr(socket, "send_fds", too_many)
            assert await spawn(server) == "the fork server ended"
            await until(lambda: server.pid != first, what="it ends")
        monkeypatch.setattr(fork_server, "SPAWN_S", 0.2)
        assert await spawn(server) == "the fork server made no worker within 0.2 s", "this one has heard"
        assert server.pid not in (0, first)
    finally:
        running.cancel()
        await asyncio.wait([running])


def too_many(*_: object) -> int:
    raise OSError(errno.ETOOMANYREFS, os.strerror(errno.ETOOMANYREFS))
