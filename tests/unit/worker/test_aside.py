"""The platform's own threads in a worker."""

import asyncio
import threading
from contextvars import ContextVar

import pytest

from sllm_runtime.worker.aside import MOST, aside
from tests.fixtures.waiting import GIVE_UP_S, until


async def test_no_more_than_so_many_work_at_once_and_all_are_done() -> None:
    here, go, most = set[int](), threading.Event(), 0

    def work(number: int) -> int:
        nonlocal most
        here.add(number)
        most = max(most, len(here))
        assert go.wait(GIVE_UP_S)
        here.discard(number)
        return number

    jobs = [asyncio.create_task(aside(work, number)) for number in range(3 * MOST)]
    await until(lambda: len(here) == MOST, what="as many as may work")
    go.set()
    assert await asyncio.gather(*jobs) == list(range(3 * MOST))
    assert most == MOST
    await until(lambda: not [each for each in threading.enumerate() if each.name == "aside"], what="they end")


async def test_what_is_raised_and_whose_context_it_is() -> None:
    known: ContextVar[str] = ContextVar("known")
    known.set("mine")
    assert await aside(known.get) == "mine"
    with pytest.raises(ZeroDivisionError):
        await aside(lambda: 1 // 0)


async def test_where_no_thread_can_be_had_nothing_waits_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(2 * MOST):
            with pytest.raises(RuntimeError, match="can't start"):
                await aside(int)
    assert await aside(int, "5") == 5


async def test_what_nobody_waits_for_any_more_is_not_begun() -> None:
    go, begun = threading.Event(), list[int]()

    def work(number: int) -> None:
        begun.append(number)
        assert go.wait(GIVE_UP_S)

    jobs = [asyncio.create_task(aside(work, number)) for number in range(3 * MOST)]
    await until(lambda: len(begun) == MOST, what="as many as may work")
    for job in jobs[MOST:]:
        job.cancel()
    await asyncio.gather(*jobs[MOST:], return_exceptions=True)
    go.set()
    await asyncio.gather(*jobs[:MOST])
    assert await aside(int, "5") == 5
    await until(lambda: not [each for each in threading.enumerate() if each.name == "aside"], what="they end")
    assert sorted(begun) == list(range(MOST))
