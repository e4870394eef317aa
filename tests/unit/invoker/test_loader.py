"""The invoker over a loaderd that is killed: sandboxes go on, and a second instance needs neither disk nor room."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sllm_invoker import loader as invoker_loader
from sllm_invoker.loader import Loader
from sllm_invoker.models import record
from sllm_loaderd.client import LoaderControl, LoaderSession
from sllm_loaderd.daemon.registration import MOST_CHILDREN
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import Forbidden, InstanceLost, ModelNotFound, Unavailable
from sllm_runtime.protocol.loader import ModelInfo, Status
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.records import ModelRecord
from tests.fixtures.loader_worker import loader_worker, seen
from tests.fixtures.loaderd import SMALL_CHUNK, LoaderProcess, adapter_checkpoint, loaderd, small_checkpoint
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import GIVE_UP_S, until

WAIT = GIVE_UP_S
ROOM = 7 * SMALL_CHUNK
"""Room for one copy of the model (five chunks), not for two."""


@pytest.fixture
async def loader(tmp_path: Path) -> AsyncIterator[Loader]:
    made = Loader(tmp_path / "loaderd.sock")
    tasks = Tasks("test")
    tasks.start(made.run(), "loader")
    yield made
    await tasks.close()
    await made.close()


def nothing(progress: Progress) -> None:
    """Nobody looks at it."""


async def registered(loader: Loader, checkpoint: Path) -> ModelRecord:
    info = await loader.register(str(checkpoint), "", lambda stage, done, total: None)
    return ModelRecord(digest=info.model, uri=str(checkpoint), nbytes=info.nbytes, partitions=info.partitions)


async def kill(daemon: LoaderProcess, loader: Loader) -> None:
    daemon.process.send_signal(signal.SIGKILL)
    await asyncio.to_thread(daemon.process.wait, WAIT)
    await until(lambda: loader.status is None, WAIT, "the invoker knows that loaderd is gone")


async def status(loader: Loader) -> Status:
    await until(lambda: loader.status is not None, WAIT, "loaderd says how it is")
    assert loader.status is not None
    return loader.status


async def test_a_sandbox_gets_the_adapters_of_its_function_and_memory_alone(tmp_path: Path, loader: Loader) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    tuned = [adapter_checkpoint(tmp_path / f"adapter{seed}", seed) for seed in range(3)]
    async with loaderd(tmp_path / "other") as elsewhere:  # the digests, so that this node knows of none
        found = [await elsewhere.control.register(str(place)) for place in (checkpoint, *tuned)]
    places = map(str, (checkpoint, *tuned))
    base, *adapters = [record(info, place, 0.0) for info, place in zip(found, places, strict=True)]
    assert [adapter.adapter for adapter in adapters] == ["base"] * 3
    async with loaderd(tmp_path, fake_devices="1x4MiB@8GB/s") as daemon:
        await status(loader)
        assert await loader.devices((0, 1)) == ("cpu", "fake:0"), "loaderd has no GPU, and one device in its place"
        fd = await loader.grant(base, "one", nothing, adapters=adapters[:2], devices=await loader.devices(()))
        session = await asyncio.to_thread(LoaderSession, fd)
        try:
            assert session.adapters == tuple(adapter.digest for adapter in adapters[:2])
            for number, adapter in enumerate(adapters[:2], 1):
                assert len(await daemon.control.models()) == number, "what no call has named is not fetched"
                load = session.load(adapter=adapter.digest)
                await asyncio.to_thread(load.wait_all, WAIT)
            with pytest.raises(Forbidden, match="this sandbox may load"):
                await asyncio.to_thread(session.load(adapter=adapters[2].digest).wait_all, WAIT)
            with pytest.raises(Forbidden, match="cpu only"):
                await asyncio.to_thread(session.load(device="fake:0").wait_all, WAIT)
        finally:
            await asyncio.to_thread(session.close)
        await loader.gone("one")


async def test_a_conversion_that_outlasts_its_start_is_joined_by_the_next_one(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun anew by each start it would never end."""
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    model = ModelRecord(digest=digest, uri=str(checkpoint), nbytes=1, partitions=(1,))
    go, asked, real = asyncio.Event(), list[str](), LoaderControl.register

    async def slow(control: LoaderControl, uri: str, **options: Any) -> ModelInfo:
        asked.append(uri)
        options["report"]("convert", 1, 2)
        await go.wait()
        return await real(control, uri, **options)

    monkeypatch.setattr(LoaderControl, "register", slow)
    async with loaderd(tmp_path):
        one = asyncio.create_task(loader.grant(model, "one", nothing))
        await until(lambda: asked, WAIT, "the conversion has begun")
        one.cancel()
        await asyncio.wait([one])
        told = list[Progress]()
        two = asyncio.create_task(loader.grant(model, "two", told.append))
        await until(lambda: told and told[-1].total == 2, WAIT, "the next start sees how far it is")
        go.set()
        os.close(await two)
        assert len(asked) == 1
        await loader.gone("two")


@pytest.mark.parametrize("awaited", [True, False])
async def test_a_model_that_is_deleted_while_it_comes_does_not_come(
    tmp_path: Path, loader: Loader, awaited: bool
) -> None:
    """It would be there for nobody, and no record would name it."""
    _, digest = small_checkpoint(tmp_path / "served")
    with range_server(tmp_path / "served") as server:
        server.script.append("stall 0")
        model = ModelRecord(digest=digest, uri=f"{server.url}/checkpoint", nbytes=1, partitions=(1,))
        async with loaderd(tmp_path) as daemon:
            start = asyncio.create_task(loader.grant(model, "one", nothing))
            await until(lambda: server.ranges, WAIT, "it comes")
            if not awaited:
                start.cancel()
                await asyncio.wait([start])
            await loader.delete(digest)
            if awaited:
                with pytest.raises(ModelNotFound, match="was deleted while it came"):
                    await start
            running = psutil.Process(daemon.process.pid)
            await until(lambda: not running.children(), WAIT, "its conversion has ended")
            await until(lambda: not list(daemon.models.iterdir()), WAIT, "nothing is left of it")
            with pytest.raises(ModelNotFound):
                await loader.delete(digest)
            await loader.gone("one")


async def test_a_grant_that_was_given_up_is_told_of_as_gone(tmp_path: Path, loader: Loader) -> None:
    """loaderd may have granted it before it heard of that."""
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    async with loaderd(tmp_path) as daemon:
        model = await registered(loader, checkpoint)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            asking = asyncio.create_task(loader.grant(model, "one", nothing))
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait([asking])
            assert loader._held == {"one"}
            assert not loader.shown
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        await loader.gone("one")
        assert not loader._held
        assert not loader._unseen


async def test_more_conversions_that_nobody_waits_for_than_loaderd_makes_at_once_are_given_up(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, digest = small_checkpoint(tmp_path / "model")
    model = ModelRecord(digest=digest, uri=str(checkpoint), nbytes=1, partitions=(1,))
    asked, ended = asyncio.Event(), asyncio.Event()

    async def slow(control: LoaderControl, uri: str, **options: Any) -> ModelInfo:
        asked.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    monkeypatch.setattr(LoaderControl, "register", slow)
    monkeypatch.setattr(invoker_loader, "MOST_FETCHES", 0)
    async with loaderd(tmp_path):
        one = asyncio.create_task(loader.grant(model, "one", nothing))
        await asyncio.wait_for(asked.wait(), WAIT)
        one.cancel()
        await asyncio.wait_for(ended.wait(), WAIT)


async def test_of_those_that_nobody_waits_for_the_one_left_first_makes_room(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a start would stand in line in loaderd behind what nobody wants, and be given up in its place."""
    assert invoker_loader.MOST_FETCHES < MOST_CHILDREN, "a registration has a place"
    models = [ModelRecord(digest=f"sha256:{n:064x}", uri="x", nbytes=1, partitions=(1,)) for n in range(3)]
    asked, ended = list[str](), list[str]()

    async def slow(control: LoaderControl, uri: str, **options: Any) -> ModelInfo:
        asked.append(options["digest"])
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(options["digest"])
        raise AssertionError

    monkeypatch.setattr(LoaderControl, "register", slow)
    monkeypatch.setattr(invoker_loader, "MOST_FETCHES", 2)
    async with loaderd(tmp_path):
        starts = list[asyncio.Task[int]]()
        for model in models[:2]:
            starts.append(asyncio.create_task(loader.grant(model, "one", nothing)))
            await until(lambda: len(asked) == len(starts), WAIT, "it comes")
        for start in reversed(starts):
            start.cancel()
            await asyncio.wait([start])
        assert ended == []
        last = asyncio.create_task(loader.grant(models[2], "one", nothing))
        await until(lambda: ended, WAIT, "there is room for it")
        await until(lambda: len(asked) == 3, WAIT, "it comes")
        assert ended == [models[1].digest]
        last.cancel()
        await asyncio.wait([last])
        assert ended == [models[1].digest], "two may go on"
        await loader.gone("one")


async def test_what_loaderd_was_not_told_of_a_sandbox_it_is_told_again(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sandbox had would be held as long as this connection lasts."""
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    tell, refused = LoaderControl.gone, list[str]()

    async def busy(control: LoaderControl, holder: str) -> None:
        if not refused:
            refused.append(holder)
            raise Unavailable("this node's loader is busy; ask again")
        await tell(control, holder)

    monkeypatch.setattr(invoker_loader, "STATUS_S", 0.01)
    monkeypatch.setattr(LoaderControl, "gone", busy)
    async with loaderd(tmp_path) as daemon:
        model = await registered(loader, checkpoint)
        control = loader._control
        async with loader_worker(await loader.grant(model, "one", nothing)) as worker:
            await seen(worker)
        assert (await daemon.control.status()).pool.held
        await loader.gone("one")
        assert refused == ["one"]
        await until(lambda: not loader._ended, WAIT, "it is told")
        assert loader._control is control
        assert not (await daemon.control.status()).pool.held


@pytest.mark.chaos
async def test_who_waits_for_a_loaderd_that_does_not_come_is_told(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invoker_loader, "CONNECT_S", 0.01)
    async with asyncio.timeout(WAIT):
        with pytest.raises(Unavailable, match="cannot be reached; it should be running"):
            await loader.validate("sha256:0")


async def test_a_loaderd_that_has_gone_is_looked_for_at_once(
    tmp_path: Path, loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest pause comes after many failures: starts wait for the one that is started again."""
    monkeypatch.setattr(invoker_loader, "RETRY_S", (*[0.01] * 10_000, 10 * WAIT))
    async with loaderd(tmp_path) as daemon:
        await status(loader)
        await kill(daemon, loader)
    async with loaderd(tmp_path):
        await status(loader)


async def test_device_memory_after_a_kill(tmp_path: Path, loader: Loader) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    right = hashlib.sha256((checkpoint / partition_name(0)).read_bytes()).hexdigest()
    room = "1x2MiB@8GB/s"  # for one copy
    devices = ("cpu", "fake:0")
    async with contextlib.AsyncExitStack() as stack:
        async with loaderd(tmp_path, fake_devices=room) as daemon:
            model = await registered(loader, checkpoint)
            fd = await loader.grant(model, "one", nothing, devices=devices)
            one = await stack.enter_async_context(loader_worker(fd, "fake:0"))
            await kill(daemon, loader)
        async with loaderd(tmp_path, fake_devices=room) as again:
            assert [device.used for device in (await status(loader)).devices] == [2**21]
            fd = await loader.grant(model, "two", nothing, devices=devices)
            async with loader_worker(fd, "fake:0") as two:
                assert await seen(two) == await seen(one) == right
            await loader.gone("two")
            await loader.gone("one")
            assert [device.used for device in (await again.control.status()).devices] == [0]


async def test_a_load_is_in_the_queues_that_the_node_tells_of_before_it_counts_as_shown(
    tmp_path: Path, loader: Loader
) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    async with loaderd(tmp_path) as daemon:
        model = await registered(loader, checkpoint)
        daemon.process.send_signal(signal.SIGSTOP)
        try:
            asking = asyncio.create_task(loader.grant(model, "one", nothing))
            await asyncio.sleep(0)
            assert not loader.shown
        finally:
            daemon.process.send_signal(signal.SIGCONT)
        os.close(await asking)
        await until(lambda: "one" in loader.shown, WAIT, "its load is seen")
        there = (await status(loader)).resident
        assert [part.model for part in there] == [model.digest], "waiting, under way or done"
        await until(lambda: loader.status and loader.status.resident[0].nbytes == model.nbytes, WAIT, "it has ended")
        await loader.gone("one")
        assert not loader.shown


async def test_a_status_that_may_have_a_load_that_counts_as_unseen_is_not_told(tmp_path: Path) -> None:
    """It began after the status was asked for and before that was answered: asked again, it is in it for sure."""
    async with loaderd(tmp_path) as daemon:
        told = Loader(tmp_path / "loaderd.sock")
        told._unseen["one", 0] = told._unseen["two", 0] = False
        asked = list[int]()
        ask = daemon.control.status

        async def status(**options: Any) -> Status:
            answer = await ask(**options)
            asked.append(len(asked))
            if len(asked) == 1:
                told._unseen["one", 0] = True
            return answer

        daemon.control.status = status  # type: ignore[method-assign]
        await told._refresh(daemon.control)
        assert len(asked) == 2
        assert told._unseen == {("two", 0): False}
        assert told.status is not None


@pytest.mark.chaos
async def test_a_second_instance_after_a_kill(tmp_path: Path, loader: Loader) -> None:
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    right = hashlib.sha256((checkpoint / partition_name(0)).read_bytes()).hexdigest()
    async with contextlib.AsyncExitStack() as stack:
        async with loaderd(tmp_path, pool_bytes=ROOM) as daemon:
            model = await registered(loader, checkpoint)
            one = await stack.enter_async_context(loader_worker(await loader.grant(model, "one", nothing)))
            await kill(daemon, loader)
        assert await seen(one) == right
        async with loaderd(tmp_path, pool_bytes=ROOM) as again:
            held = (await status(loader)).pool
            assert held.used == held.held == 5 * SMALL_CHUNK
            (again.model_directory(model.digest) / partition_name(0)).unlink()
            async with loader_worker(await loader.grant(model, "two", nothing)) as two:
                assert await seen(two) == await seen(one) == right
            await loader.gone("two")
            await loader.gone("one")
            assert (await again.control.status()).pool.held == 0
            await kill(again, loader)

        # Nobody holds them any more, but they are there: a start after the next kill binds them, too.
        async with loaderd(tmp_path, pool_bytes=ROOM) as third:
            async with loader_worker(await loader.grant(model, "three", nothing)) as three:
                assert await seen(three) == right
            await kill(third, loader)
            await loader.gone("three")
        async with loaderd(tmp_path, pool_bytes=ROOM) as fourth:
            await status(loader)
            pool = (await fourth.control.status()).pool
            assert (pool.used, pool.held) == (5 * SMALL_CHUNK, 0), "who died meanwhile holds nothing"


async def test_a_loaderd_that_goes_away_is_no_fault_of_the_start_that_it_was_asked_for(
    tmp_path: Path, loader: Loader
) -> None:
    """Whoever hears of it first, the invoker or the sandbox: such a start may be made again at once."""
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    async with loaderd(tmp_path) as daemon:
        model = await registered(loader, checkpoint)
        fd = await loader.grant(model, "one", nothing)
        daemon.process.send_signal(signal.SIGSTOP)
        asking = asyncio.create_task(loader.grant(model, "two", nothing))
        await asyncio.sleep(0)
        daemon.process.send_signal(signal.SIGKILL)
        await asyncio.to_thread(daemon.process.wait, WAIT)
        for asked in (asking, asyncio.to_thread(LoaderSession, fd)):
            with pytest.raises(InstanceLost):
                await asked
    async with loaderd(tmp_path):
        await until(lambda: loader.status is not None, WAIT, "the next one is there")
        os.close(await loader.grant(model, "three", nothing))
        for holder in ("one", "two", "three"):
            await loader.gone(holder)


async def test_a_load_that_was_begun_for_a_sandbox_ends_with_it(tmp_path: Path, loader: Loader) -> None:
    """Nobody waits for it any more: it would take the path and the memory of the next starts, and its model could not
    be deleted."""
    small_checkpoint(tmp_path / "served")
    with range_server(tmp_path / "served") as server:
        async with loaderd(tmp_path, remote_threads=1) as daemon:
            info = await loader.register(f"{server.url}/checkpoint", "", lambda stage, done, total: None)
            model = record(info, f"{server.url}/checkpoint", 0.0)
            server.script.append("stall 0")
            os.close(await loader.grant(model, "one", nothing))
            await until(lambda: not server.script, WAIT, "its first chunk comes")
            await loader.gone("one")  # its start was given up
            server.released.set()

            async def quiet() -> bool:
                return not any(path.queued["start"] for path in (await daemon.control.status()).paths)

            await until(quiet, WAIT, "nothing of it is read any more")
            there = sum(part.nbytes for part in (await daemon.control.status()).resident)
            assert there <= SMALL_CHUNK, "no more than the chunk that was being read"
            await loader.delete(model.digest)


async def test_a_sandbox_that_died_as_it_was_given_chunks_holds_none_after_a_kill(
    tmp_path: Path, loader: Loader
) -> None:
    """What loaderd says of it is heard behind its end. Nobody would ever say that it is gone."""
    checkpoint, _ = small_checkpoint(tmp_path / "model")
    async with loaderd(tmp_path) as daemon:
        model = await registered(loader, checkpoint)
        fd = await loader.grant(model, "one", nothing)
        session = LoaderSession(fd)  # from here on the invoker is busy: it hears nothing until it waits for something
        session.load().wait_all(WAIT)
        session.close()
        await loader.gone("one")
        await until(lambda: len(loader._kept) == 5, WAIT, "the invoker keeps what it was given")
        assert (await daemon.control.status()).pool.held == 0
        await kill(daemon, loader)
    async with loaderd(tmp_path) as again:
        await status(loader)
        pool = (await again.control.status()).pool
        assert (pool.used, pool.held) == (5 * SMALL_CHUNK, 0)
