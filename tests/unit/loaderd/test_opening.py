"""What a thread opens for a task that is cancelled meanwhile has an owner."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.daemon.settings import read_settings
from sllm_loaderd.opening import opened
from sllm_loaderd.ssd.write import CopyWrite
from sllm_loaderd.store import StoredModel
from tests.fixtures.loaderd import SMALL_CHUNK, small_checkpoint
from tests.fixtures.range_server import range_server
from tests.fixtures.waiting import GIVE_UP_S, until


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


async def test_a_copy_that_is_given_up_while_it_begins_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither its place in the tier nor its file: the next one would find it being written, for ever."""
    small_checkpoint(tmp_path)
    begun, go = threading.Event(), threading.Event()
    places = ("--node", "x", "--data", str(tmp_path / "data"), "--socket", str(tmp_path / "s"))
    settings = read_settings([*places, "--chunk-bytes", str(SMALL_CHUNK), "--pool-bytes", str(2**24)])
    made = list[CopyWrite | None]()
    with range_server(tmp_path) as server:
        service = LoaderService(settings)
        ssd, begin = service.store.ssd, service.store.ssd.begin

        def slow(model: StoredModel, rank: int, *, wanted: bool = False) -> CopyWrite | None:
            begun.set()
            assert go.wait(GIVE_UP_S)
            found = begin(model, rank, wanted=wanted)
            made.append(found)
            return found

        try:
            info = await service.register(f"{server.url}/checkpoint", "", lambda *_: None)
            monkeypatch.setattr(ssd, "begin", slow)
            copying = asyncio.create_task(service.copying.copy(info.model, lambda *_: None))
            await until(begun.is_set, what="the copy begins")
            copying.cancel()
            await asyncio.wait([copying])
            go.set()
            await until(lambda: made and not ssd.making(info.model, 0), what="it is given up")
            assert made[0] is not None
            assert ssd.status()[0] == 0
            assert not list((tmp_path / "data" / "ssd").iterdir())
            monkeypatch.undo()
            await service.copying.copy(info.model, lambda *_: None)
            assert ssd.holds(info.model, 0)
        finally:
            await service.close()
