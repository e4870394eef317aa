"""loaderd is killed: what its sandboxes hold goes on, and the next loaderd gets it back from who kept it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import threading
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sllm_loaderd import adoption
from sllm_loaderd.client import KeptBatch, KeptChunks, LoaderControl, memory
from sllm_loaderd.sealed import create_sealed
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import PoolExhausted
from sllm_runtime.protocol.loader import Adopt, Adopted, PoolStatus, Store
from tests.fixtures.loader_worker import loader_worker, seen
from tests.fixtures.loaderd import SMALL_CHUNK, LoaderProcess, kill, loaderd, small_checkpoint
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.loaderd.node import CHUNK, Node

WAIT = GIVE_UP_S
ROOM = 7 * SMALL_CHUNK
"""A pool with room for one copy of the model (six chunks), not for two."""


@pytest.fixture
def kept() -> KeptChunks:
    return KeptChunks()


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as made:
        yield made


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return small_checkpoint(tmp_path / "model")[0]


def sha256(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / partition_name(0)).read_bytes()).hexdigest()


@contextlib.asynccontextmanager
async def worker(daemon: LoaderProcess, model: str, holder: str) -> AsyncIterator[Process]:
    """A process that has loaded the model."""
    async with loader_worker(await daemon.control.grant(holder, model)) as process:
        yield process


async def bring_back(daemon: LoaderProcess, kept: KeptChunks) -> list[Adopted]:
    return [await daemon.control.adopt(batch) for batch in kept.batches()]


async def pool(daemon: LoaderProcess) -> PoolStatus:
    return (await daemon.control.status()).pool


@pytest.mark.chaos
async def test_a_killed_loaderd_gets_its_chunks_back(tmp_path: Path, checkpoint: Path, kept: KeptChunks) -> None:
    right = sha256(checkpoint)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(kept.close)
        async with loaderd(tmp_path, pool_bytes=ROOM, kept=kept) as daemon:
            model = (await daemon.control.register(str(checkpoint))).model
            one = await stack.enter_async_context(worker(daemon, model, "one"))
            used = (await pool(daemon)).used
            assert len(kept) == used // SMALL_CHUNK
            await kill(daemon)
        assert await seen(one) == right

        async with loaderd(tmp_path, pool_bytes=ROOM, kept=kept) as again:
            (answer,) = await bring_back(again, kept)
            assert (len(answer.ids), answer.counted) == (len(kept), ())
            status = await again.control.status()
            assert (status.pool.used, status.pool.held) == (used, used)
            assert status.resident[0].holders == ("one",)
            # Nothing of it can come from the disk now, and a second copy would not fit.
            (again.model_directory(model) / partition_name(0)).unlink()
            async with worker(again, model, "two") as two:
                assert await seen(two) == right
                assert (await pool(again)).used == used
            assert await seen(one) == right

            await again.control.gone("two")
            with pytest.raises(PoolExhausted):
                await again.control.reserve("sha256:" + "0" * 64, ROOM)
            await again.control.evict(model)
            assert (await pool(again)).retiring == used
            assert await seen(one) == right
            await again.control.gone("one")
            assert (await pool(again)).free == ROOM
            await until(lambda: not len(kept), what="what is free is not kept")


@pytest.mark.chaos
async def test_a_chunk_that_was_not_filled_counts_and_serves_nobody(
    tmp_path: Path, checkpoint: Path, kept: KeptChunks
) -> None:
    async with loaderd(tmp_path, pool_bytes=ROOM) as daemon:
        model = (await daemon.control.register(str(checkpoint))).model
        fd, address = create_sealed("half", SMALL_CHUNK)
        memory.unmap(address, SMALL_CHUNK)
        try:
            batch = KeptBatch(model, 0, SMALL_CHUNK, ("one",), (0,), (os.fstat(fd).st_ino,), (fd,))
            answer = await daemon.control.adopt(batch)
            assert (answer.ids, answer.counted) == ((), batch.ids)
            assert (await pool(daemon)).retiring == SMALL_CHUNK
            # The whole model would fit, were it not for this chunk and its holder.
            async with worker(daemon, model, "two") as two:
                assert await seen(two) == sha256(checkpoint)
            await daemon.control.gone("one")
            assert (await pool(daemon)).retiring == 0
            # Nobody holds it: it is not even counted.
            answer = await daemon.control.adopt(KeptBatch(model, 0, SMALL_CHUNK, (), (0,), batch.ids, (fd,)))
            assert (answer.ids, answer.counted) == ((), ())
        finally:
            os.close(fd)


async def test_chunks_that_are_looked_at_stay_until_that_has_ended(
    model: StoredModel, monkeypatch: pytest.MonkeyPatch, stack: contextlib.ExitStack
) -> None:
    """However often their request is given up: who closes them would end loaderd by a fault."""
    begun, go, looked = threading.Event(), threading.Event(), list[str]()

    def slow(view: memoryview) -> str:
        begun.set()
        assert go.wait(WAIT)
        looked.append("a chunk")
        return ""

    monkeypatch.setattr(adoption, "chunk_digest", slow)
    fd, address = create_sealed("chunk", CHUNK)
    memory.unmap(address, CHUNK)
    stack.callback(os.close, fd)
    request = Adopt(
        request=1, model=model.checkpoint.digest, partition=0, chunk_bytes=CHUNK, numbers=(0,), ids=(1,), holders=(),
        fds=1,
    )  # fmt: skip
    with contextlib.closing(Node()) as node:
        task = asyncio.create_task(adoption.adopt(request, [fd], model, node.pool, node.residency))
        task.add_done_callback(lambda _: looked.append("over"))
        await until(begun.is_set, what="a thread looks at it")
        for _ in range(2):  # the request is cancelled, then its connection ends
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        still = node.pool.status().used
        go.set()
        await asyncio.wait([task])
        await until(lambda: len(looked) > 1, what="both have ended")
        assert looked == ["a chunk", "over"]
        assert (still, node.pool.status().used) == (CHUNK, 0)


KINDS = ("unsealed", "small", "no file", "chunk size", "number", "model", "partition")


async def test_what_is_no_chunk_is_not_trusted(tmp_path: Path, checkpoint: Path) -> None:
    content = (checkpoint / partition_name(0)).read_bytes()[:SMALL_CHUNK]
    async with loaderd(tmp_path) as daemon:
        model = (await daemon.control.register(str(checkpoint))).model
        for kind in KINDS:
            with contextlib.ExitStack() as stack:
                fd = descriptor(stack, kind, content)
                batch = KeptBatch(
                    model if kind != "model" else "sha256:" + "0" * 64,
                    partition=3 if kind == "partition" else 0,
                    chunk_bytes=4096 if kind == "chunk size" else SMALL_CHUNK,
                    holders=("one",),
                    numbers=(99 if kind == "number" else 0,),
                    ids=(os.fstat(fd).st_ino,),
                    fds=(fd,),
                )
                answer = await daemon.control.adopt(batch)
            assert answer.ids == (), kind
            assert bool(answer.counted) == (kind in ("number", "model", "partition")), kind
            await daemon.control.gone("one")
            status = await pool(daemon)
            assert (status.used, status.retiring) == (0, 0), kind


def descriptor(stack: contextlib.ExitStack, kind: str, content: bytes) -> int:
    """A chunk with the right bytes, but for what `kind` says."""
    if kind == "no file":
        fd, other = os.pipe()
        stack.callback(os.close, other)
    elif kind == "unsealed":
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(fd, content)
    else:
        size = SMALL_CHUNK // 2 if kind == "small" else SMALL_CHUNK
        fd, address = create_sealed("chunk", size)
        memory.view(address, size)[:] = content[:size]
        memory.unmap(address, size)
    stack.callback(os.close, fd)
    return fd


async def test_a_connection_that_is_made_anew_changes_nothing(
    tmp_path: Path, checkpoint: Path, kept: KeptChunks
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(kept.close)
        daemon = await stack.enter_async_context(loaderd(tmp_path, pool_bytes=ROOM, kept=kept))
        model = (await daemon.control.register(str(checkpoint))).model
        async with worker(daemon, model, "one") as one:
            before = await daemon.control.status()
            await daemon.control.close()
            control = await stack.enter_async_context(LoaderControl(daemon.socket, kept))
            (answer,) = [await control.adopt(batch) for batch in kept.batches()]
            assert len(answer.ids) == len(kept) == before.pool.used // SMALL_CHUNK
            after = await control.status()
            assert after.resident == before.resident
            assert (after.pool.used, after.pool.held) == (before.pool.used, before.pool.held)
            assert await seen(one) == sha256(checkpoint)
        await control.gone("one")
        await control.evict(model)
        await until(lambda: not len(kept), what="what is free is not kept")


async def test_a_second_sandbox_brings_no_second_descriptor(tmp_path: Path, checkpoint: Path, kept: KeptChunks) -> None:
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(kept.close)
        daemon = await stack.enter_async_context(loaderd(tmp_path, kept=kept))
        model = (await daemon.control.register(str(checkpoint))).model
        for holder in ("one", "two"):
            await stack.enter_async_context(worker(daemon, model, holder))
        (batch,) = kept.batches()
        assert batch.holders == ("one", "two")
        assert len(batch.fds) == len(kept) == (await pool(daemon)).used // SMALL_CHUNK
        kept.gone("one")
        assert [found.holders for found in kept.batches()] == [("two",)]


def test_what_comes_after_the_end_is_closed(kept: KeptChunks) -> None:
    kept.close()
    fd = os.dup(0)
    message = Store(batch=1, holder="h", model="m", partition=0, chunk_bytes=4096, numbers=(0,), ids=(7,), fds=1)
    kept.store(message, [fd])
    assert len(kept) == 0
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
