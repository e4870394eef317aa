"""What a thread opens for a task that is cancelled meanwhile has an owner."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.daemon.sandbox import Rights, SandboxConnection
from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.daemon.settings import read_settings
from sllm_loaderd.devices.fake import FakeAllocation
from sllm_loaderd.opening import finished, opened
from sllm_loaderd.pipeline import Pipeline
from sllm_loaderd.reader import ChunkSource, close_all
from sllm_loaderd.ssd.fill import Fill
from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.store import StoredModel
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.errors import Conflict, CorruptCheckpoint, ModelNotFound, PoolExhausted, Unavailable
from sllm_runtime.protocol.loader import CONVERT_LATER, CONVERT_NEVER, Load
from tests.fixtures.loaderd import SMALL_CHUNK, numbers_model, small_checkpoint
from tests.fixtures.range_server import RangeServer, range_server
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.loaderd.node import Node, RemoteSource
from tests.unit.loaderd.test_write_back import copy_of, original


async def test_what_is_opened_for_nobody_is_given_back() -> None:
    begun, go, given = threading.Event(), threading.Event(), list[str]()

    def action() -> str:
        begun.set()
        assert go.wait(GIVE_UP_S)
        return "file"

    def give_back(file: str) -> None:
        given.append(file)

    task = asyncio.create_task(opened(action, give_back))
    await until(begun.is_set, what="the thread opens it")
    task.cancel()
    await asyncio.wait([task])
    assert not given
    go.set()
    await until(lambda: given == ["file"], what="it is given back")


async def test_what_is_opened_for_somebody_is_his() -> None:
    given = list[str]()
    assert await opened(lambda: "file", given.append) == "file"
    with pytest.raises(FileNotFoundError):
        await opened(Path("/no/such/file").read_text, given.append)
    assert not given


async def test_what_has_to_come_to_its_end_is_over_before_its_task() -> None:
    begun, go, ended = threading.Event(), threading.Event(), list[str]()

    def action() -> None:
        begun.set()
        assert go.wait(GIVE_UP_S)
        ended.append("action")

    task = asyncio.create_task(finished(action))
    task.add_done_callback(lambda _: ended.append("task"))
    await until(begun.is_set, what="the thread is at it")
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not ended
    go.set()
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert task.cancelled()
    assert ended == ["action", "task"]
    with pytest.raises(FileNotFoundError):
        await finished(Path("/no/such/file").read_text)


# --- in the service -------------------------------------------------------------------------------------
@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    with range_server(tmp_path) as running:
        yield running


@pytest.fixture
async def service(tmp_path: Path, server: RangeServer) -> AsyncIterator[LoaderService]:
    """Its connections to ``server`` end before that."""
    places = ("--node", "x", "--data", str(tmp_path / "data"), "--socket", str(tmp_path / "s"))
    made = LoaderService(read_settings([*places, "--chunk-bytes", str(SMALL_CHUNK), "--pool-bytes", str(2**24)]))
    yield made
    await made.close()


class Slow:
    """A call in a thread that goes on when whoever waited for it has given up; what it returned."""

    def __init__(self, action: Callable[..., Any]) -> None:
        self._action = action
        self.begun, self.go = threading.Event(), threading.Event()
        self.made = list[Any]()

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.begun.set()
        assert self.go.wait(GIVE_UP_S)
        self.made.append(self._action(*args, **options))
        return self.made[-1]

    async def outlives(self, asking: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(asking)
        await until(self.begun.is_set, what="the thread has begun")
        task.cancel()
        await asyncio.wait([task])
        self.go.set()
        await until(lambda: self.made, what="the thread has made it")


class Source:
    """``ChunkSource`` of nothing."""

    path = name = "here"

    def __init__(self) -> None:
        self.closed = False

    def read(self, view: memoryview, offset: int) -> str:
        raise AssertionError

    def close(self) -> None:
        self.closed = True


def nothing(*_: object) -> None:
    """Nobody looks at it."""


def one_thread_beside_a_slow_one() -> None:
    """What the loop gives to threads goes in order then."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))


async def others_turn() -> None:
    """Behind what the loop and its thread have to do now, however often they wait for each other."""
    for _ in range(8):
        await asyncio.to_thread(nothing)


def is_open(model: StoredModel) -> bool:
    """Whether its memfd is."""
    try:
        return os.readlink(f"/proc/self/fd/{model.fd}").startswith("/memfd:sllm-files")
    except FileNotFoundError:
        return False


async def test_a_model_that_is_opened_for_nobody_is_closed(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, digest = small_checkpoint(tmp_path)
    await service.register(str(checkpoint), "", nothing)
    service._open.pop(digest).close()
    slow = Slow(service.store.open_latest)
    monkeypatch.setattr(service.store, "open_latest", slow)
    await slow.outlives(service.model(digest))
    await until(lambda: not is_open(slow.made[0]), what="it is closed")


async def test_a_model_that_is_deleted_while_a_load_opens_its_files_is_not_sent(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of its closed descriptor may be another file's by then."""
    checkpoint, digest = small_checkpoint(tmp_path)
    await service.register(str(checkpoint), "", nothing)
    opens, opened_them, go = Pipeline.open_sources, threading.Event(), threading.Event()

    def slow(pipeline: Pipeline, model: StoredModel, rank: int) -> list[ChunkSource]:
        found = opens(pipeline, model, rank)
        opened_them.set()
        assert go.wait(GIVE_UP_S)
        return found

    monkeypatch.setattr(Pipeline, "open_sources", slow)
    load = Load(request=1, model=digest)
    loading = asyncio.create_task(
        service.load(load, "w", ready=nothing, progress=nothing, done=nothing, failed=nothing)
    )
    await until(opened_them.is_set, what="its files are open")
    deleting = asyncio.create_task(service.delete(digest))
    await until(deleting.done, what="it is deleted, or that is refused")
    go.set()
    await asyncio.wait([loading])
    assert loading.exception() is not None or is_open(loading.result().model)


@pytest.mark.parametrize("failure", [OSError(errno.EMFILE, "Too many open files"), Unavailable("the driver is gone")])
async def test_a_load_to_a_device_whose_memory_cannot_be_sent_leaves_nothing_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    """Neither its number, nor a partition that is read from for ever and makes room for nobody."""

    def fails(allocation: FakeAllocation) -> int:
        raise failure

    checkpoint, digest = small_checkpoint(tmp_path)
    places = ("--node", "x", "--data", str(tmp_path / "data"), "--socket", str(tmp_path / "s"))
    sizes = ("--chunk-bytes", str(SMALL_CHUNK), "--pool-bytes", str(2**24), "--fake-devices", "1x2MiB@8GB/s")
    service = LoaderService(read_settings([*places, *sizes]))
    ours, theirs = socket.socketpair()
    wire = AsyncWire(ours, max_fds=0)
    try:
        await service.register(str(checkpoint), "", nothing)
        sandbox = SandboxConnection(wire, Rights("w", digest), service, nothing)
        request = Load(request=1, device="fake:0")
        with monkeypatch.context() as patched:
            patched.setattr(FakeAllocation, "export", fails)
            with pytest.raises(type(failure)):
                await sandbox._load(request)
        assert not sandbox._loads
        assert not service.residency.ending(digest)
        await sandbox._load(request)
        await until(lambda: not sandbox._loads, what="it is done")
    finally:
        wire.close()
        theirs.close()
        await service.close()


async def test_a_model_whose_conversion_is_opened_for_nobody_stays_as_it_was(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers_model(tmp_path / "model")
    digest = (await service.register(str(tmp_path / "model"), "", nothing, CONVERT_NEVER)).model
    slow = Slow(service.store.open)
    monkeypatch.setattr(service.store, "open_replaced", slow)
    await slow.outlives(service.model(digest))
    await until(lambda: not is_open(slow.made[0]), what="it is closed")
    assert is_open(service._open[digest])


async def test_a_model_that_comes_to_memory_while_its_conversion_is_opened_stays_as_it_is(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in memory has the old layout: by the new index it would be other numbers."""
    numbers_model(tmp_path / "model")
    digest = (await service.register(str(tmp_path / "model"), "", nothing, CONVERT_NEVER)).model
    known, slow = service._open[digest], Slow(service.store.open)
    monkeypatch.setattr(service.store, "open_replaced", slow)
    asking = asyncio.create_task(service.model(digest))
    await until(slow.begun.is_set, what="the thread has begun")
    monkeypatch.setattr(service.residency, "has", lambda asked: asked == digest)
    slow.go.set()
    assert await asking is known
    assert is_open(known)
    assert not is_open(slow.made[0])


async def test_a_registration_goes_on_for_those_who_wait_still(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, digest = small_checkpoint(tmp_path)
    begun, go, convert = asyncio.Event(), asyncio.Event(), service.registrations._convert

    async def slow(*given: Any) -> Any:
        begun.set()
        await go.wait()
        return await convert(*given)

    monkeypatch.setattr(service.registrations, "_convert", slow)
    one, two = (asyncio.create_task(service.register(str(checkpoint), "", nothing)) for _ in range(2))
    await begun.wait()
    one.cancel()
    await asyncio.wait([one])
    go.set()
    assert (await two).model == digest


async def test_nobody_waits_for_what_is_left_of_a_conversion(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a whole model: to remove it takes seconds, in which all of the node would stand still."""
    checkpoint, digest = small_checkpoint(tmp_path)
    await service.register(str(checkpoint), "", nothing)
    shutil.copytree(checkpoint, tmp_path / "again")
    removing, go, rmtree = threading.Event(), threading.Event(), shutil.rmtree

    def slow(path: Path, ignore_errors: bool = False) -> None:
        removing.set()
        assert go.wait(GIVE_UP_S)
        rmtree(path, ignore_errors)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", slow)
        again = asyncio.create_task(service.register(str(tmp_path / "again"), "", nothing))
        await until(removing.is_set, what="its model is here already")
        go.set()
        info = await again
    assert (info.model, len(info.sources)) == (digest, 2)
    assert len(list(service.store.models.iterdir())) == 1


@pytest.mark.parametrize("step", ["adopt", "remember"])
async def test_a_model_that_is_deleted_as_it_comes_leaves_nothing(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Who asked for it has just given it up: it would stay, or what is known of its source."""
    one_thread_beside_a_slow_one()
    checkpoint, digest = small_checkpoint(tmp_path)
    slow = Slow(getattr(service.store, step))
    monkeypatch.setattr(service.store, step, slow)
    coming = asyncio.create_task(service.register(str(checkpoint), "", nothing))
    await until(slow.begun.is_set, what="it comes into the store")
    coming.cancel()
    deleting = asyncio.create_task(service.delete(digest))
    await others_turn()
    slow.go.set()
    await asyncio.wait([coming, deleting])
    assert coming.cancelled()
    assert deleting.exception() is None
    assert service.store.digests() == []
    assert service.store.sources(digest) == []


async def test_a_model_that_is_wanted_as_it_comes_has_its_source(
    service: LoaderService, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory is seen before, and nothing could be read."""
    one_thread_beside_a_slow_one()
    digest = small_checkpoint(tmp_path)[1]
    slow = Slow(service.store.remember)
    monkeypatch.setattr(service.store, "remember", slow)
    coming = asyncio.create_task(service.register(f"{server.url}/checkpoint", "", nothing))
    await until(slow.begun.is_set, what="it comes into the store")

    async def load() -> list[ChunkSource]:
        model = await service.model(digest)
        return await asyncio.to_thread(model.open_sources, 0)

    loading = asyncio.create_task(load())
    await others_turn()
    slow.go.set()
    close_all(await loading)
    await coming


@pytest.mark.parametrize("copied", [True, False])
async def test_what_begins_while_a_deleted_models_conversion_ends_is_seen(
    service: LoaderService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """And one that is refused at once ends no conversion."""
    numbers_model(tmp_path / "model")
    begun, ending, go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    convert = service.registrations._convert

    async def slow(*given: Any) -> Any:
        if "--idle" not in given:
            return await convert(*given)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await go.wait()

    monkeypatch.setattr(service.registrations, "_convert", slow)
    digest = (await service.register(str(tmp_path / "model"), "", nothing, CONVERT_LATER)).model
    await begun.wait()
    service.copying.running.add(digest)
    with pytest.raises(Conflict, match="is being copied"):
        await service.delete(digest)
    assert not ending.is_set()
    service.copying.running.discard(digest)
    deleting = asyncio.create_task(service.delete(digest))
    await ending.wait()
    if copied:
        service.copying.running.add(digest)
        go.set()
        with pytest.raises(Conflict, match="is being copied"):
            await deleting
        assert service.store.digests() == [digest]
    else:
        await service.model(digest)
        go.set()
        await deleting
        with pytest.raises(ModelNotFound):
            await service.model(digest)


@pytest.mark.parametrize("copied", [True, False])
async def test_sources_that_are_opened_for_nobody_are_closed(
    service: LoaderService, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """For a load, and for a copy to the SSD tier."""
    small_checkpoint(tmp_path)
    digest = (await service.register(f"{server.url}/checkpoint", "", nothing)).model
    slow = Slow(lambda *_: [Source()])
    monkeypatch.setattr(Pipeline, "open_sources", lambda *given: slow(*given))
    if copied:
        await slow.outlives(service.copying.copy(digest, nothing))
    else:
        load = Load(request=1, model=digest)
        await slow.outlives(service.load(load, "", ready=nothing, progress=nothing, done=nothing, failed=nothing))
    await until(lambda: slow.made[0][0].closed, what="they are closed")


async def test_a_copy_that_is_given_up_while_it_begins_leaves_nothing(
    service: LoaderService, server: RangeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its place in the tier nor its file: the next one would find it being written, for ever."""
    small_checkpoint(tmp_path)
    ssd = service.store.ssd
    info = await service.register(f"{server.url}/checkpoint", "", nothing)
    slow, begin = Slow(ssd.begin), ssd.begin
    monkeypatch.setattr(ssd, "begin", slow)
    await slow.outlives(service.copying.copy(info.model, nothing))
    await until(lambda: not ssd.making(info.model, 0), what="it is given up")
    assert slow.made[0] is not None
    assert ssd.status()[0] == 0
    assert not list((tmp_path / "data" / "ssd").iterdir())
    monkeypatch.setattr(ssd, "begin", begin)
    await service.copying.copy(info.model, nothing)
    assert ssd.holds(info.model, 0)


@contextlib.contextmanager
def filling(
    model: StoredModel, directory: Path, sources: Sequence[RemoteSource]
) -> Iterator[tuple[Fill, SsdDirectory, Node]]:
    """A partition that is to come to the SSD tier for no load."""
    tier, node = SsdDirectory(directory, 2**24), Node()
    write = tier.begin(model, 0)
    assert write is not None
    try:
        yield Fill(model, 0, write, sources, node.paths, integrity=True, written=nothing), tier, node
    finally:
        node.close()
        for source in sources:
            source.close()


@pytest.mark.parametrize("fault", ["lost", "wrong"])
async def test_a_chunk_that_one_source_cannot_bring_is_copied_from_the_next(
    model: StoredModel, tmp_path: Path, fault: str
) -> None:
    first, second = RemoteSource(model, "peer a"), RemoteSource(model, "s3 b")
    getattr(first, fault).update({1, 3})
    with filling(model, tmp_path, [first, second]) as (fill, tier, node):
        await fill.run(node.pool, node.residency)
        assert copy_of(model, tier) == original(model)
        assert {1, 3} <= set(second.read_chunks)
        if fault == "lost":  # its path seems to be down: what follows is asked of the next one at once
            assert 0 not in second.read_chunks
        else:
            assert sorted(second.read_chunks) == [1, 3]
        assert node.pool.status().used == 0


async def test_a_copy_without_a_source_that_has_it_right_is_none(
    model: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its index, or by what an earlier load has learnt of a model without digests."""
    source = RemoteSource(model)
    source.wrong.add(2)
    with filling(model, tmp_path, [source]) as (fill, tier, node):
        with pytest.raises(CorruptCheckpoint, match="chunk 2 "):
            await fill.run(node.pool, node.residency)
        assert (tier.status()[0], node.pool.status().used) == (0, 0)
    source = RemoteSource(model)
    monkeypatch.setattr(model, "learn", lambda rank, number, found: CorruptCheckpoint("it was another one"))
    with filling(model, tmp_path, [source]) as (fill, tier, node):
        with pytest.raises(CorruptCheckpoint, match="it was another one"):
            await fill.run(node.pool, node.residency)
        assert (tier.status()[0], node.pool.status().used) == (0, 0)


async def test_a_copy_that_is_given_up_has_its_memory_until_nobody_reads_into_it(
    model: StoredModel, tmp_path: Path
) -> None:
    """Else it would be read into what another model has by then."""
    source = RemoteSource(model)
    source.gate.clear()
    with filling(model, tmp_path, [source]) as (fill, tier, node):
        task = asyncio.create_task(fill.run(node.pool, node.residency))
        await until(lambda: source.read_chunks, what="it is being read")
        task.cancel()
        await others_turn()
        assert not task.done()
        assert node.pool.status().used
        source.gate.set()
        await asyncio.wait([task])
        assert task.cancelled()
        assert node.pool.status().used == 0
        await until(lambda: not tier.making(model.checkpoint.digest, 0), what="it is given up")


async def test_a_copy_that_is_cancelled_as_it_fails_leaves_nothing(
    model: StoredModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no thread is free to remove it at once."""
    tier, node = SsdDirectory(tmp_path, 2**24), Node()
    write = tier.begin(model, 0)
    assert write is not None

    def full(*_: object) -> list[Chunk]:
        raise PoolExhausted("no room")

    monkeypatch.setattr(node.residency, "spare", full)
    loop, go = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    busy = loop.run_in_executor(None, go.wait, GIVE_UP_S)
    try:
        fill = Fill(model, 0, write, [], node.paths, integrity=True, written=nothing)
        filling = asyncio.create_task(fill.run(node.pool, node.residency))
        await asyncio.sleep(0)
        filling.cancel()
        await asyncio.wait([filling])
        assert tier.making(model.checkpoint.digest, 0)
        go.set()
        await busy
        await until(lambda: not tier.making(model.checkpoint.digest, 0), what="it is given up")
        assert not os.listdir(tmp_path)
    finally:
        go.set()
        node.close()
