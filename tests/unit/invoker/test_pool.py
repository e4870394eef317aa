"""The warm pool over real processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from sllm_invoker import pool as warm_pool
from sllm_invoker import process_driver
from sllm_invoker.pool import MAX_FORKS, WarmPool
from sllm_invoker.process_driver import ProcessDriver
from sllm_invoker.sandbox import PLAIN, Sandbox, Wish
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.invoker import SCRIPTED
from tests.fixtures.suspended import suspend
from tests.fixtures.waiting import GIVE_UP_S, until


@asynccontextmanager
async def pool_of(size: int, **options: Any) -> AsyncIterator[WarmPool]:
    driver = ProcessDriver(dict(os.environ), argv=SCRIPTED, isolate=False)
    await driver.start()
    tasks = Tasks("test")
    pool = WarmPool(driver, size, **{"refill_delay_s": 0.0, **options})
    tasks.start(pool.run(), "pool")
    try:
        yield pool
    finally:
        await pool.close()
        await tasks.close()
        await driver.close()


async def test_it_fills_itself_and_each_is_used_once() -> None:
    async with pool_of(2) as pool:
        assert not pool.filled.is_set()
        await until(lambda: pool.idle == 2, what="it is full")
        await until(pool.filled.is_set, what="it says so")
        taken = [await pool.acquire() for _ in range(3)]
        assert len({sandbox.pid for sandbox in taken}) == 3
        await until(lambda: pool.idle == 2, what="it is full again")
        for sandbox in taken:
            await sandbox.close()


async def test_it_says_how_long_one_takes_to_be_made_once_that_can_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    can, began = asyncio.Event(), list[float]()
    ready, clock = ProcessDriver.ready, asyncio.get_running_loop().time

    async def waits(driver: ProcessDriver, wish: Wish = PLAIN) -> None:
        await can.wait()
        await ready(driver, wish)
        began.append(clock())

    monkeypatch.setattr(ProcessDriver, "ready", waits)
    async with pool_of(1) as pool:
        asked = clock()
        await asyncio.sleep(0.2)
        assert pool.made_s == 0.0
        can.set()
        await until(lambda: pool.idle == 1, what="it is full")
        assert 0.0 < pool.made_s <= clock() - began[0]
        assert began[0] - asked >= 0.2


async def test_without_warm_ones_a_start_waits_for_the_one_being_made() -> None:
    async with pool_of(0) as pool:
        taken = await asyncio.gather(*(pool.acquire() for _ in range(6)))
        assert len({sandbox.pid for sandbox in taken}) == 6
        assert pool.idle == 0
        await asyncio.gather(*(sandbox.close() for sandbox in taken))


async def test_those_that_wait_are_replaced_one_by_one_when_others_would_be_better() -> None:
    seen, looks = list[int](), list[Callable[[], int]]()
    async with pool_of(2, on_change=lambda: seen.extend(look() for look in looks)) as pool:
        await until(lambda: pool.idle == 2, what="it is full")
        old = [*pool._idle]
        looks.append(lambda: pool.idle)
        pool.renew()
        await until(lambda: all(sandbox.exited.done() for sandbox in old), what="they have ended")
        assert seen
        assert min(seen) >= 2, "it was never short of one"
        assert pool.idle == 2


async def test_one_that_is_to_be_replaced_is_better_than_none() -> None:
    async with pool_of(2, refill_delay_s=2 * GIVE_UP_S) as pool:
        await until(lambda: pool.idle == 2, what="it is full")
        old = [*pool._idle]
        taken = [await pool.acquire()]
        pool.renew()
        taken.append(await pool.acquire())
        assert taken == old
        assert pool.idle == 0
        for sandbox in taken:
            await sandbox.close()


async def test_one_that_died_while_it_waited_is_replaced() -> None:
    async with pool_of(1) as pool:
        await until(lambda: pool.idle == 1, what="it is full")
        dead = await pool.acquire()
        await dead.close()
        await until(lambda: pool.idle == 1, what="it is full again")
        waiting = pool._idle[0]
        os.kill(waiting.pid, signal.SIGKILL)
        await until(lambda: pool.idle == 1 and pool._idle[0] is not waiting, what="there is another one")
        sandbox = await pool.acquire()
        assert not sandbox.exited.done()
        await sandbox.close()


async def test_one_whose_end_is_not_told_yet_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork server's turn has not come yet when a worker is dead."""
    monkeypatch.setattr(process_driver, "EXIT_REPORT_S", GIVE_UP_S)
    async with pool_of(1) as pool:
        await until(lambda: pool.idle == 1, what="it is full")
        waiting = pool._idle[0]
        assert isinstance(pool._driver, ProcessDriver)
        suspend(pool._driver.fork_server_pid)
        os.kill(waiting.pid, signal.SIGKILL)
        await until(lambda: waiting.pid == 0, what="the worker is dead")
        assert not waiting.exited.done()
        acquiring = asyncio.create_task(pool.acquire())
        await until(lambda: pool._making, what="another one is being made")
        os.kill(pool._driver.fork_server_pid, signal.SIGCONT)
        async with asyncio.timeout(GIVE_UP_S):
            sandbox = await acquiring
        assert sandbox is not waiting
        os.kill(sandbox.pid, 0)
        await sandbox.close()


async def test_a_start_that_gives_up_loses_no_sandbox() -> None:
    async with pool_of(0) as pool:
        acquiring = asyncio.create_task(pool.acquire())
        await until(lambda: pool._making, what="one is being made")
        acquiring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await acquiring
        async with asyncio.timeout(GIVE_UP_S):
            sandbox = await pool.acquire()
        await sandbox.close()


async def test_a_start_that_gives_up_as_its_sandbox_comes_loses_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(driver: ProcessDriver, wish: Wish = PLAIN) -> None:
        await asyncio.Event().wait()

    async with pool_of(1, refill_delay_s=2 * GIVE_UP_S) as pool:
        await until(lambda: pool.idle == 1, what="it is full")
        sandbox = await pool.acquire()
        monkeypatch.setattr(ProcessDriver, "ready", never)  # no other one comes
        acquiring = asyncio.create_task(pool.acquire())
        await until(lambda: pool.wanted, what="the next one waits")
        pool._put(sandbox)
        assert not pool.wanted
        acquiring.cancel()
        await asyncio.wait([acquiring])
        assert pool.idle == 1


async def test_only_so_many_are_made_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    can, ready = asyncio.Event(), ProcessDriver.ready

    async def waits(driver: ProcessDriver, wish: Wish = PLAIN) -> None:
        await can.wait()
        await ready(driver, wish)

    monkeypatch.setattr(ProcessDriver, "ready", waits)
    async with pool_of(0) as pool:
        starts = [asyncio.create_task(pool.acquire()) for _ in range(MAX_FORKS + 2)]
        await until(lambda: pool._making, what="they are being made")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(pool._making) == MAX_FORKS
        can.set()
        for sandbox in await asyncio.gather(*starts):
            await sandbox.close()


@pytest.mark.parametrize("error", [Unavailable("no process can be made"), OSError("too many open files")])
async def test_what_cannot_be_made_is_not_tried_all_the_time(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    tried = list[str]()

    async def create(driver: ProcessDriver, name: str, wish: Wish = PLAIN) -> Sandbox:
        tried.append(name)
        raise error

    monkeypatch.setattr(ProcessDriver, "create", create)
    monkeypatch.setattr(warm_pool, "BACKOFF_S", (10 * GIVE_UP_S,))
    async with pool_of(0) as pool:
        acquiring = asyncio.create_task(pool.acquire())
        await until(lambda: tried and not pool._making, what="it is tried")
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(tried) == 1
        acquiring.cancel()
        await asyncio.wait([acquiring])


async def test_of_starts_that_give_up_no_more_wait_than_shall(monkeypatch: pytest.MonkeyPatch) -> None:
    can, ready = asyncio.Event(), ProcessDriver.ready

    async def waits(driver: ProcessDriver, wish: Wish = PLAIN) -> None:
        await can.wait()
        await ready(driver, wish)

    monkeypatch.setattr(ProcessDriver, "ready", waits)
    async with pool_of(1) as pool:
        starts = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        await until(lambda: len(pool._making) == 4, what="one is made for each, and one that waits")
        for start in starts:
            start.cancel()
        await asyncio.wait(starts)
        can.set()
        await until(lambda: not pool._making and not pool._closing, what="all have been made")
        assert pool.idle == 1


@pytest.mark.parametrize("problem", [Unavailable("no process can be made"), OSError(28, "No space left on device")])
async def test_one_that_cannot_be_filled_says_so(monkeypatch: pytest.MonkeyPatch, problem: Exception) -> None:
    """Who waits for its node to begin waits no longer."""

    async def create(driver: ProcessDriver, name: str, wish: Wish = PLAIN) -> Sandbox:
        raise problem

    monkeypatch.setattr(ProcessDriver, "create", create)
    async with pool_of(1) as pool, asyncio.timeout(GIVE_UP_S):
        await pool.filled.wait()
        assert isinstance(pool.last_error, Unavailable)
        assert pool.idle == 0


async def test_refilling_leaves_a_start_alone_for_a_moment() -> None:
    async with pool_of(1, refill_delay_s=0.5) as pool:
        await until(lambda: pool.idle == 1, what="it is full")
        loop = asyncio.get_running_loop()
        began = loop.time()
        sandbox = await pool.acquire()
        await until(lambda: pool.idle == 1, what="it is full again")
        assert loop.time() - began >= 0.5
        await sandbox.close()


async def test_refilling_leaves_calls_that_move_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    monkeypatch.setattr(warm_pool, "RESTS_S", 0.6)
    async with pool_of(2, refill_delay_s=0.2) as pool:
        await until(lambda: pool.idle == 2, what="it is full")
        loop = asyncio.get_running_loop()
        began = loop.time()
        sandboxes = [await pool.acquire()]
        while pool.idle == 1:
            assert loop.time() - began < GIVE_UP_S
            pool.rest()
            await asyncio.sleep(0.02)
        assert loop.time() - began >= 0.6
        began = loop.time()
        for idle in (1, 0):
            sandboxes.append(await pool.acquire())
            assert pool.idle == idle
        while pool.idle == 0:  # without one it is filled as ever
            pool.rest()
            await asyncio.sleep(0.02)
        assert loop.time() - began < 0.6
        sandboxes.append(await pool.acquire())
        for sandbox in sandboxes:
            await sandbox.close()


async def test_those_who_wait_are_told_when_it_closes() -> None:
    driver = ProcessDriver(dict(os.environ), argv=("sleep", "100"), isolate=False)
    pool = WarmPool(driver, 1)
    acquiring = asyncio.create_task(pool.acquire())
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(Unavailable, match="shutting down"):
        await acquiring
    with pytest.raises(Unavailable, match="shutting down"):
        await pool.acquire()
