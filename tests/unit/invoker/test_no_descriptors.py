"""A node that has no descriptor left tries again and again to make a sandbox, and loses none by that."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sllm_invoker.loader import Loader
from sllm_invoker.models import record
from sllm_invoker.process_driver import ProcessDriver
from sllm_loaderd.client import LoaderSession
from sllm_runtime.platform import wire
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.invoker import SCRIPTED
from tests.fixtures.loaderd import loaderd, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until


async def test_what_was_opened_for_a_sandbox_that_cannot_be_made_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = ProcessDriver(dict(os.environ), argv=SCRIPTED, isolate=False)
    await driver.start()
    try:
        before, pipe2, made = set(os.listdir("/proc/self/fd")), os.pipe2, list[int]()

        def one(flags: int) -> tuple[int, int]:
            if len(made) % 4 == 2:  # room for a socket pair and one pipe
                made.extend((-1, -1))
                raise OSError(errno.EMFILE, "Too many open files")
            made.extend(ends := pipe2(flags))
            return ends

        monkeypatch.setattr(os, "pipe2", one)
        for _ in range(5):
            with pytest.raises(OSError, match="Too many open files"):
                await driver.create("a")
        assert set(os.listdir("/proc/self/fd")) == before
    finally:
        monkeypatch.undo()
        await driver.close()


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """This process may open nothing more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.dup(0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_a_node_without_descriptors_outlives_its_loaderd(tmp_path: Path) -> None:
    """A node whose task ``loader`` has failed ends, and all its instances with it."""
    failed, loader = list[BaseException](), Loader(tmp_path / "loaderd.sock")
    tasks = Tasks("node", failed.append)
    try:
        async with loaderd(tmp_path):
            tasks.start(loader.run(), "loader")
            await until(lambda: loader.status is not None, what="it is there")
        await until(lambda: loader.status is None, what="it is gone")
        with no_descriptors():
            await asyncio.sleep(0.5)  # it is looked for again
        assert not failed
        async with loaderd(tmp_path):
            await until(lambda: loader.status is not None or failed, what="it is there again")
            assert not failed
    finally:
        await tasks.close()
        await loader.close()


async def test_chunks_that_cannot_be_brought_back_for_want_of_descriptors_end_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    failed, loader = list[BaseException](), Loader(tmp_path / "loaderd.sock")
    tasks = Tasks("node", failed.append)
    try:
        async with loaderd(tmp_path) as daemon:
            tasks.start(loader.run(), "loader")
            await until(lambda: loader.status is not None, what="it is there")
            info = await loader.register(str(checkpoint), "", lambda stage, done, total: None)
            fd = await loader.grant(record(info, str(checkpoint), 0.0), "one", lambda progress: None)
            session = await asyncio.to_thread(LoaderSession, fd)
            await asyncio.to_thread(session.load().wait_all, GIVE_UP_S)
            await until(lambda: len(loader._kept), what="its chunks are kept")
            daemon.process.kill()
            await until(lambda: loader.status is None, what="it is gone")
            await asyncio.to_thread(session.close)
        real, tries = os.dup, list[int]()

        def short(number: int) -> int:
            tries.append(number)
            if len(tries) == 3:
                raise OSError(errno.EMFILE, "Too many open files")
            return real(number)

        monkeypatch.setattr(os, "dup", short)
        async with loaderd(tmp_path):
            await until(lambda: loader.status is not None or failed, what="it is there again")
            assert len(tries) >= 3
            assert not failed
            await loader.gone("one")
    finally:
        monkeypatch.undo()
        await tasks.close()
        await loader.close()


async def test_a_worker_born_without_a_descriptor_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel drops what it cannot hand over."""
    driver = ProcessDriver(dict(os.environ), argv=SCRIPTED, isolate=False)
    await driver.start()
    try:
        first = await driver.create("a")
        real: Any = vars(wire)["receive"]

        def starved(*arguments: Any) -> Any:
            with no_descriptors():
                return real(*arguments)

        monkeypatch.setattr(wire, "receive", starved)
        with pytest.raises(Unavailable, match="no descriptor is left"):
            await driver.create("b")
        monkeypatch.undo()
        third = await driver.create("c")
        assert not first.exited.done()
        await asyncio.gather(first.close(), third.close())
    finally:
        monkeypatch.undo()
        await driver.close()
