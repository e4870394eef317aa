"""Which adapters of an instance are in memory: brought once, kept while used, given up when their room is needed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
import torch

from sllm_loaderd.client import LoaderSession
from sllm_runtime.protocol.errors import (
    CorruptCheckpoint,
    DeadlineExceeded,
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    SllmError,
)
from sllm_runtime.worker.adapters import Adapters, Load, loader
from sllm_runtime.worker.arriving import Weights
from sllm_runtime.worker.engine.ours.adapter import Adapter, LowRank
from sllm_runtime.worker.engine.ours.lora import Lora

DIGESTS = {name: f"sha256:{name}" for name in "abcd"}
DEADLINE_S = 60.0


def small(digest: str) -> Adapter:
    half = LowRank(torch.ones(8, 2), torch.ones(2, 8))
    return Adapter(digest, {"q": half})


SIZE = small("x").nbytes


def table() -> Lora:
    return Lora({"q.weight": torch.zeros(8, 8)})


class Loads:
    """Counts, and waits for ``go`` where there is one."""

    def __init__(self, made: Callable[[str], Adapter] = small) -> None:
        self.digests: list[str] = []
        self.begun = threading.Event()
        self.go: threading.Event | None = None
        self._made = made

    def __call__(self, digest: str) -> Adapter:
        self.digests.append(digest)
        self.begun.set()
        if self.go is not None:
            assert self.go.wait(DEADLINE_S)
        return self._made(digest)


def adapters(load: Load, room: int = 2 * SIZE, timeout_s: float = DEADLINE_S) -> Adapters:
    return Adapters(DIGESTS, load, room, timeout_s)


async def use(kept: Adapters, lora: Lora, *names: str) -> None:
    for name in names:
        async with kept.held(name, lora):
            assert lora.get(name) is not None


async def test_the_least_recently_used_goes_when_room_is_needed() -> None:
    load, lora = Loads(), table()
    kept = adapters(load)
    await use(kept, lora, "a", "b", "a", "c")
    assert kept.present == ("a", "c")
    with pytest.raises(ModelNotFound):
        lora.get("b")
    assert lora.get("a") is not None
    await use(kept, lora, "b")
    assert kept.present == ("c", "b")
    assert load.digests == [DIGESTS[name] for name in ("a", "b", "c", "b")]


async def test_who_is_used_stays_however_little_room_there_is() -> None:
    lora = table()
    kept = adapters(Loads(), room=0)
    async with kept.held("a", lora):
        async with kept.held("a", lora):
            await use(kept, lora, "b", "c")
            assert list(kept.present) == ["a"]
        assert list(kept.present) == ["a"], "one of two uses it still"
    assert not kept.present


async def test_all_who_want_it_wait_for_one_load_and_keep_no_thread_from_others() -> None:
    load, lora = Loads(), table()
    load.go = threading.Event()
    kept = adapters(load)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    waiting = [asyncio.create_task(use(kept, lora, "a")) for _ in range(6)]
    async with asyncio.timeout(DEADLINE_S):
        assert await asyncio.to_thread(load.begun.wait, DEADLINE_S), "the one thread there is does other work"
        assert not kept.present
        load.go.set()
        await asyncio.gather(*waiting)
    assert load.digests == [DIGESTS["a"]]
    assert list(kept.present) == ["a"]


async def test_a_slow_load_keeps_no_other_waiting() -> None:
    load, lora = Loads(lambda digest: slow(digest) if digest == DIGESTS["a"] else small(digest)), table()
    go = threading.Event()

    def slow(digest: str) -> Adapter:
        assert go.wait(DEADLINE_S)
        return small(digest)

    kept = adapters(load)
    waiting = asyncio.create_task(use(kept, lora, "a"))
    async with asyncio.timeout(DEADLINE_S):
        await use(kept, lora, "b")
        assert list(kept.present) == ["b"]
        go.set()
        await waiting


@pytest.mark.parametrize("room", [0, SIZE])
async def test_who_is_cancelled_leaves_the_load_to_whoever_is_next(room: int) -> None:
    load, lora = Loads(), table()
    load.go = threading.Event()
    kept = adapters(load, room)
    waiting = asyncio.create_task(use(kept, lora, "a"))
    assert await asyncio.to_thread(load.begun.wait, DEADLINE_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    following = asyncio.create_task(use(kept, lora, "a"))
    await asyncio.sleep(0)
    load.go.set()
    await following
    assert load.digests == [DIGESTS["a"]]
    assert list(kept.present) == ["a"][: room // SIZE]


async def test_what_nobody_waits_for_any_more_takes_no_more_than_the_room() -> None:
    load, lora = Loads(), table()
    load.go = threading.Event()
    kept = adapters(load, room=0)
    waiting = asyncio.create_task(use(kept, lora, "a"))
    assert await asyncio.to_thread(load.begun.wait, DEADLINE_S)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    bringing = [thread for thread in threading.enumerate() if thread.name == "adapter a"]
    load.go.set()
    for thread in bringing:
        await asyncio.to_thread(thread.join, DEADLINE_S)
    assert not kept.present


async def test_a_load_that_fails_is_told_and_tried_again() -> None:
    def broken(digest: str) -> Adapter:
        if len(load.digests) == 1:
            raise CorruptCheckpoint("its bytes are others")
        return small(digest)

    load, lora = Loads(broken), table()
    kept = adapters(load)
    with pytest.raises(CorruptCheckpoint):
        await use(kept, lora, "a")
    assert not kept.present
    await use(kept, lora, "a")


async def test_a_load_that_does_not_come_has_a_deadline() -> None:
    load, lora = Loads(), table()
    load.go = threading.Event()
    kept = adapters(load, timeout_s=0.01)
    with pytest.raises(DeadlineExceeded, match="'a'"):
        await use(kept, lora, "a")
    load.go.set()


async def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ModelNotFound, match="a, b, c, d"):
        await use(adapters(small), table(), "e")
    with pytest.raises(InvalidRequest, match="runs no adapters"):
        async with adapters(small).held("a", None):
            pass
    with pytest.raises(ModelNotFound, match="none"):
        await use(Adapters.none(), table(), "a")


@pytest.mark.parametrize(("error", "told"), [(InstanceLost("loaderd is gone"), 1), (CorruptCheckpoint("spoilt"), 0)])
async def test_an_instance_whose_loaderd_has_gone_brings_no_more_adapters_and_ends(error: SllmError, told: int) -> None:
    """Else it would be there, and refuse each call that names one that it lacks."""

    class Session:
        def load(self, *, adapter: str) -> None:
            raise error

    failures = list[SllmError]()
    model = Weights(cast(LoaderSession, Session()), [], 0.0, DEADLINE_S)
    model.on_failure(failures.append)
    kept = adapters(loader(model, DEADLINE_S))
    for _ in range(2):
        with pytest.raises(type(error)):
            await use(kept, table(), "a")
    assert failures == [error] * told


async def test_an_instance_without_room_for_an_adapter_says_what_to_do() -> None:
    """What torch says of it is no word for a caller."""

    class Session:
        def load(self, *, adapter: str) -> None:
            torch.empty(1 << 62, dtype=torch.uint8)

    model = Weights(cast(LoaderSession, Session()), [], 0.0, DEADLINE_S)
    with pytest.raises(OutOfMemory, match="memory="):
        await use(adapters(loader(model, DEADLINE_S)), table(), "a")
