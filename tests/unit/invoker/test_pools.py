"""Warm sandboxes of several kinds: real processes, of a driver that serves plain wishes alone, as containers' does."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sllm_invoker.bundles import BundleCache
from sllm_invoker.images.base import Base
from sllm_invoker.images.functions import FunctionImages
from sllm_invoker.images.store import Store
from sllm_invoker.pools import WarmPools
from sllm_invoker.preparation import Suppliers, assignment, prepare
from sllm_invoker.process_driver import ProcessDriver
from sllm_invoker.sandbox import PLAIN, Sandbox, Wish
from sllm_invoker.wiring import clustered
from sllm_invoker.workdir import Workdirs
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.invoker import BUNDLE, SCRIPTED, order
from tests.fixtures.waiting import GIVE_UP_S, until

FLASK, TORCH, GPU = Wish(image="flask"), Wish(image="torch"), Wish(gpus=(0,))


class Particular(ProcessDriver):
    """It remembers who was made for which wish, and makes none of ``missing``."""

    def __init__(self) -> None:
        super().__init__(dict(os.environ), argv=SCRIPTED, isolate=False)
        self.made: dict[Sandbox, Wish] = {}
        self.missing = ""

    def serves(self, wish: Wish) -> bool:
        return wish == PLAIN

    async def create(self, name: str, wish: Wish = PLAIN) -> Sandbox:
        if wish.image and wish.image == self.missing:
            raise Unavailable(f"{wish.image} is not there")
        sandbox = await super().create(name, wish)
        self.made[sandbox] = wish
        return sandbox

    def alive(self, wish: Wish) -> set[Sandbox]:
        """Those that were made for it and have not ended."""
        return {sandbox for sandbox, made_for in self.made.items() if made_for == wish and sandbox.pid}


@asynccontextmanager
async def pools_of(size: int, kinds: int) -> AsyncIterator[tuple[WarmPools, Particular]]:
    driver, tasks = Particular(), Tasks("test")
    await driver.start()
    pools = WarmPools(driver, size, kinds=kinds, refill_delay_s=0.0)
    tasks.start(pools.run(), "pools")
    try:
        async with asyncio.timeout(3 * GIVE_UP_S):
            yield pools, driver
    finally:
        await pools.close()
        await tasks.close()
        await driver.close()


async def test_a_kind_that_was_asked_for_waits_for_the_next_who_asks() -> None:
    async with pools_of(1, kinds=2) as (pools, driver):
        first = await pools.acquire(FLASK)
        await until(lambda: pools.others == {FLASK: 1}, what="another one waits")
        (waiting,) = driver.alive(FLASK) - {first}
        second = await pools.acquire(FLASK)
        assert second is waiting
        await until(lambda: pools.others == {FLASK: 1}, what="it is replaced")
        await until(lambda: pools.idle == 1, what="those for everybody are there beside it")
        for sandbox in (first, second):
            await sandbox.close()


async def test_each_gets_one_of_its_own_kind() -> None:
    wishes = (FLASK, PLAIN, TORCH, FLASK, GPU, FLASK)
    async with pools_of(2, kinds=3) as (pools, driver):
        for _ in range(2):  # the first time made for it, the second time some have waited
            taken = await asyncio.gather(*map(pools.acquire, wishes))
            assert [driver.made[sandbox] for sandbox in taken] == list(wishes)
            assert len(set(taken)) == len(wishes)
            await until(lambda: pools.others == {FLASK: 1, TORCH: 1, GPU: 1}, what="one of each waits")
            await asyncio.gather(*(sandbox.close() for sandbox in taken))


async def test_what_nobody_asked_for_since_makes_room() -> None:
    async with pools_of(1, kinds=2) as (pools, driver):
        for wish in (FLASK, TORCH, FLASK, GPU):
            await (await pools.acquire(wish)).close()
        await until(lambda: pools.others == {FLASK: 1, GPU: 1}, what="those that were asked for last wait")
        await until(lambda: not driver.alive(TORCH), what="the other one has ended")


async def test_a_kind_that_is_waited_for_makes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it would be told that the node is shutting down."""
    can, ready = asyncio.Event(), ProcessDriver.ready

    async def waits(driver: ProcessDriver, wish: Wish = PLAIN) -> None:
        await (can.wait() if wish == FLASK else ready(driver))

    monkeypatch.setattr(ProcessDriver, "ready", waits)
    async with pools_of(1, kinds=1) as (pools, _):
        waiting = asyncio.create_task(pools.acquire(FLASK))
        await until(lambda: FLASK in pools.others, what="it is being made")
        await (await pools.acquire(TORCH)).close()
        can.set()
        await (await waiting).close()
        await (await pools.acquire(GPU)).close()
        assert set(pools.others) == {GPU}, "now nobody waits for it"


async def test_who_wishes_the_network_gets_one_that_was_made_for_it() -> None:
    wish = Wish(network=True, image="flask")
    async with pools_of(1, kinds=2) as (pools, driver):
        sandbox = await pools.acquire(wish)
        assert driver.made[sandbox] == wish
        assert pools.others == {}
        await sandbox.close()


async def test_who_shares_the_network_of_another_gets_one_that_was_made_for_it() -> None:
    wish = Wish(cluster="sb-1", gpus=(0,))
    async with pools_of(1, kinds=2) as (pools, driver):
        sandbox = await pools.acquire(wish)
        assert driver.made[sandbox] == wish
        assert pools.others == {}
        await sandbox.close()


async def bundle(_digest: str, _nbytes: int) -> bytes:
    return BUNDLE


@pytest.mark.parametrize(("gpus", "shared"), [((0, 1), True), ((), False)])
async def test_ranks_on_gpus_share_the_network_of_number_0(gpus: tuple[int, ...], shared: bool, tmp_path: Path) -> None:
    async with pools_of(1, kinds=2) as (pools, driver), AsyncExitStack() as stack:
        weights: Any = None  # it has no model
        suppliers = Suppliers(pools, BundleCache(tmp_path / "bundles", bundle), weights, Workdirs(tmp_path))
        asked = msgspec.structs.replace(order(parallelism={"tensor": 3}), gpus=gpus, proofs=("found",))
        assert clustered(asked) == shared
        prepared = await prepare(asked, suppliers, stack, lambda _progress: None, time.monotonic)
        first, *others = (seat.sandbox for seat in prepared.seats)
        assert driver.made[first].cluster == ""
        assert [driver.made[each].cluster for each in others] == [first.name if shared else ""] * 2
        assigns = [assignment(asked, prepared, seat, suppliers.proofs) for seat in prepared.seats]
        assert [each.cluster for each in assigns] == [shared] * 3
        assert {each.proofs for each in assigns} == {("found",)}, "all ranks begin with the same"
        assert {each.threads for each in assigns} == {1}, "a tenth of a core is one"


@pytest.mark.parametrize(("size", "kinds"), [(0, 2), (1, 0)])
async def test_where_none_is_to_wait_none_does(size: int, kinds: int) -> None:
    async with pools_of(size, kinds) as (pools, driver):
        sandbox = await pools.acquire(FLASK)
        assert driver.made[sandbox] == FLASK
        assert pools.others == {}
        await sandbox.close()


async def test_who_asks_for_what_cannot_be_made_is_told_at_once_and_nobody_goes_on_trying() -> None:
    async with pools_of(1, kinds=2) as (pools, driver):
        driver.missing = "flask"
        said = await asyncio.gather(*(pools.acquire(FLASK) for _ in range(3)), return_exceptions=True)
        assert [str(error) for error in said] == ["flask is not there"] * 3
        assert pools.last_error is None, "it is not the matter with plain ones"
        driver.missing = ""
        assert pools.others == {FLASK: 0}
        await (await pools.acquire(FLASK)).close()
        await until(lambda: pools.others == {FLASK: 1}, what="once it was made, another one waits")


async def test_short_of_memory_none_waits_and_who_asks_gets_one() -> None:
    async with pools_of(2, kinds=2) as (pools, driver):
        first = await pools.acquire(FLASK)
        await until(lambda: pools.idle == 2 and pools.others == {FLASK: 1}, what="all wait")
        pools.press(True)
        assert (pools.idle, pools.others) == (0, {FLASK: 0})
        await until(lambda: len(driver.alive(FLASK) | driver.alive(PLAIN)) == 1, what="all but the one at work end")
        taken = [await pools.acquire(wish) for wish in (FLASK, PLAIN, TORCH)]
        assert (pools.idle, pools.others) == (0, {FLASK: 0, TORCH: 0})
        pools.press(False)
        await until(lambda: pools.idle == 2 and pools.others == {FLASK: 1, TORCH: 1}, what="they are there again")
        for sandbox in (first, *taken):
            await sandbox.close()


async def test_after_its_end_there_are_none() -> None:
    async with pools_of(1, kinds=2) as (pools, _):
        await (await pools.acquire(FLASK)).close()
        await pools.close()
        for wish in (FLASK, PLAIN):
            with pytest.raises(Unavailable, match="shutting down"):
                await pools.acquire(wish)


class Tagged:
    """The command line of an engine that has one image, by a name that another one may be given."""

    kind = "podman"
    has = "sha256:" + "a" * 64

    async def command(self, *words: str, data: bytes | None = None, within_s: float = 60.0) -> str:
        return f"{self.has}\n"


async def test_an_image_that_is_built_anew_is_what_the_next_start_runs_from(tmp_path: Path) -> None:
    """`podman build -t mine:1` again, and a deployment: a container that waits has what was there before."""
    engine = Tagged()
    store = Store(engine)
    images = FunctionImages(store, Base(store, tmp_path, {}), tmp_path, {})
    async with pools_of(1, kinds=2) as (pools, _):
        first = await pools.acquire(Wish(image=await images.ensure("mine:1", ())))
        await until(lambda: set(pools.others.values()) == {1}, what="another one waits")
        before = Wish(image=await images.ensure("mine:1", ()))
        assert pools.others == {before: 1}, "what is as it was is taken from those that wait"
        engine.has = "sha256:" + "b" * 64
        wish = Wish(image=await images.ensure("mine:1", ()))
        second = await pools.acquire(wish)
        assert wish != before, "it was made of the image that is no longer called so"
        for sandbox in (first, second):
            await sandbox.close()
