"""A node that is short of threads or descriptors for a moment: loads end, are told why, and go on later."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import socket
import threading
from pathlib import Path

import pytest

from sllm_invoker.loader import Loader
from sllm_invoker.models import record
from sllm_loaderd.client import LoaderControl
from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.store import StoredModel
from sllm_loaderd.verify import open_checkpoint, validate_checkpoint
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.loaderd import loaderd, small_checkpoint
from tests.fixtures.waiting import until
from tests.unit.loaderd.node import Node, RemoteSource


class Threads:
    """``Thread.start`` where so many are ``left``: a user, and a control group, may have so many processes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: float = float("inf")
        real = threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.left <= 0:
                raise RuntimeError("can't start new thread")
            self.left -= 1
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Threads:
    return Threads(monkeypatch)


def test_a_load_without_any_thread_ends_and_is_tried_again(model: StoredModel, threads: Threads) -> None:
    with contextlib.closing(Node()) as node:
        threads.left = 0
        told: list[BaseException | None] = []
        try:
            wish = node.wish(model, holder="")
            node.turn()
            told += wish.ended
        except RuntimeError as error:  # the daemon says so to who asked, as of any bug
            told.append(error)
        assert len(told) == 1
        threads.left = float("inf")
        again = node.wish(model, holder="")
        node.until(lambda: again.ended)  # waited for ever: its chunks were there in all but bytes
        assert again.ended == [None]
        assert isinstance(told[0], Unavailable)


def test_a_load_goes_on_with_the_threads_that_there_are(model: StoredModel, threads: Threads) -> None:
    with contextlib.closing(Node(threads=2)) as node:
        threads.left = 1
        wish = node.wish(model)
        node.until(lambda: wish.ended)
        assert wish.ended == [None]


def test_a_copy_for_which_there_is_no_thread_ends_no_load(tmp_path: Path, model: StoredModel, threads: Threads) -> None:
    with contextlib.closing(Node(threads=2, ssd=SsdDirectory(tmp_path / "ssd", 2**30))) as node:
        threads.left = 2  # of the path to the source; the disk's has none
        wish = node.wish(model, sources=[RemoteSource(model)])
        node.until(lambda: wish.ended)
        assert wish.ended == [None]


async def test_a_daemon_without_descriptors_serves_again_when_there_are_some(tmp_path: Path) -> None:
    async with loaderd(tmp_path) as daemon:
        pid = daemon.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir(f"/proc/{pid}/fd"))
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        lowest = next(n for n in range(highest + 2) if n not in taken)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest, before[1]))
        with socket.socket(socket.AF_UNIX) as another:
            another.connect(str(daemon.socket))
            await asyncio.sleep(0.5)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            assert await daemon.control.status()  # who was there before is served on
        async with LoaderControl(daemon.socket) as later:
            assert await later.models() == ()


async def test_a_daemon_without_descriptors_outlives_the_invoker_that_asks_how_it_is(tmp_path: Path) -> None:
    """Which it does each second; where it is not told it hangs up, looks for it again, and has left its sandboxes."""
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    loader, tasks = Loader(tmp_path / "loaderd.sock"), Tasks("test")
    async with loaderd(tmp_path) as daemon:
        tasks.start(loader.run(), "loader")
        try:
            await until(lambda: loader.status is not None, what="it is there")
            info = await loader.register(str(checkpoint), "", lambda stage, done, total: None)
            os.close(await loader.grant(record(info, str(checkpoint), 0.0), "one", lambda progress: None))
            pid = daemon.process.pid
            before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
            await until(lambda: loader.status is None, what="the invoker has hung up")
            await asyncio.sleep(2.0)
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
            await until(lambda: loader.status is not None, what="it is there again")
            assert loader.status is not None
            assert loader.status.pid == pid
        finally:
            await tasks.close()
            await loader.close()


async def test_a_model_that_nobody_can_open_just_now_is_not_called_damaged(tmp_path: Path) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    async with loaderd(tmp_path) as daemon:
        info = await daemon.control.register(str(checkpoint))
        pid = daemon.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        with pytest.raises(Unavailable, match="Too many open files"):
            await daemon.control.prefetch(info.model)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        await daemon.control.prefetch(info.model)


def test_an_index_that_cannot_be_opened_just_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, digest = small_checkpoint(tmp_path / "model")

    def short(path: Path) -> bytes:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_bytes", short)
    with pytest.raises(Unavailable, match="Too many open files; try again"):
        open_checkpoint(checkpoint, digest)
    with pytest.raises(Unavailable, match="Too many open files; try again"):
        validate_checkpoint(checkpoint)
