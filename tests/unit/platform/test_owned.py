"""Tasks with an owner."""

import asyncio
import contextlib

import pytest

from sllm_runtime.platform.owned import Tasks, each, end
from tests.fixtures.waiting import GIVE_UP_S


async def test_close_cancels_and_waits() -> None:
    tasks, ended = Tasks("x"), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(1)

    for n in range(3):
        tasks.start(work(), str(n))
    await asyncio.sleep(0)
    assert len(tasks) == 3
    await tasks.close()
    assert ended == [1, 1, 1]
    assert len(tasks) == 0


async def test_a_failure_is_told_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    tasks = Tasks("x", failures.append)

    async def fail() -> None:
        raise ValueError("boom")

    task = tasks.start(fail(), "worker")
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert [str(error) for error in failures] == ["boom"]
    assert "x: worker" in caplog.text
    await tasks.close()


async def test_nothing_starts_after_close() -> None:
    tasks = Tasks("x")
    await tasks.close()
    with pytest.raises(RuntimeError, match="closed"):
        tasks.start(asyncio.sleep(0), "late")


async def test_one_that_swallows_its_first_cancellation_is_ended_too() -> None:
    tasks = Tasks("x")

    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.Event().wait()

    tasks.start(stubborn(), "stubborn")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.close(), GIVE_UP_S)


async def test_an_owned_task_may_close_its_owner() -> None:
    tasks = Tasks("x")
    task = tasks.start(tasks.close(), "closer")
    await asyncio.wait_for(task, GIVE_UP_S)


async def test_one_that_swallows_every_cancellation_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    tasks, free = Tasks("x"), asyncio.Event()

    async def deaf() -> None:
        while not free.is_set():
            try:
                await free.wait()
            except asyncio.CancelledError:
                continue

    task = tasks.start(deaf(), "deaf")
    await asyncio.sleep(0)
    await asyncio.wait_for(tasks.close(within_s=0.1), GIVE_UP_S)
    assert "given up 0.1 s after they were cancelled: x: deaf" in caplog.text
    free.set()
    await asyncio.wait([task])


async def test_one_that_swallows_its_cancellation_is_ended_all_the_same() -> None:
    async def deaf_once() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    task = asyncio.create_task(deaf_once())
    await asyncio.sleep(0)
    await end([task])
    assert task.cancelled()


async def test_each_is_done_so_many_together_and_in_order() -> None:
    begun, most, running = list[int](), 0, 0

    async def work(number: int) -> None:
        nonlocal most, running
        begun.append(number)
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await each(range(10), work, 3)
    assert (begun, most) == (list(range(10)), 3)


async def test_the_first_that_fails_ends_the_others_and_is_raised() -> None:
    ended = list[int]()

    async def work(number: int) -> None:
        if number == 1:
            raise ValueError("boom")
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    with pytest.raises(ValueError, match="boom"):
        await each(range(10), work, 3)
    assert sorted(ended) == [0, 2]


async def test_each_is_cancelled_with_its_caller() -> None:
    ended = list[int]()

    async def work(number: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(number)

    task = asyncio.create_task(each(range(10), work, 3))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await end({task})
    assert task.cancelled()
    assert sorted(ended) == [0, 1, 2]
