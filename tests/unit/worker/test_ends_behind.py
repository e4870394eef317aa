"""A cancelled call ends when what runs for it has: also a coroutine from behind a plain decorator, and an iterator."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.worker.harness import Worker, bundle_of, manifest

SOURCE = """
import asyncio, functools, time
from pathlib import Path


def passed_on(function):
    @functools.wraps(function)
    def wrapper(**arguments):
        return function(**arguments)
    return wrapper


async def _plain(mark: str) -> None:
    Path(mark).write_text("begun")
    try:
        await asyncio.sleep(60)
    finally:
        await asyncio.sleep(0.5)  # a transaction is rolled back
        Path(mark).write_text("closed")


async def direct(mark: str) -> None:
    await _plain(mark)


@passed_on
async def wrapped(mark: str) -> None:
    await _plain(mark)


def _blocking(mark):
    try:
        for number in range(1000):
            yield number
            time.sleep(0.5)
            Path(mark).write_text("running")
    finally:
        Path(mark).write_text("closed")


def sync_values(mark: str):
    return _blocking(mark)


async def async_values(mark: str):
    return _blocking(mark)
"""


@pytest.mark.parametrize(("name", "kind"), [("direct", "async_function"), ("wrapped", "function")])
def test_a_cancelled_call_ends_behind_its_coroutine(worker: Worker, tmp_path: Path, name: str, kind: str) -> None:
    worker.start(manifest(f"user:{name}", kind), bundle_of({"user.py": SOURCE}), workdir=tmp_path)
    mark = tmp_path / "mark"
    number = worker.call({"mark": str(mark)})
    worker.until(mark.exists)
    worker.cancel(number)
    assert worker.finish(number).error.code == "cancelled"
    assert mark.read_text() == "closed"


@pytest.mark.parametrize(("name", "kind"), [("sync_values", "function"), ("async_values", "async_function")])
def test_a_cancelled_call_ends_behind_its_iterator(worker: Worker, tmp_path: Path, name: str, kind: str) -> None:
    worker.start(manifest(f"user:{name}", kind), bundle_of({"user.py": SOURCE}), workdir=tmp_path)
    mark = tmp_path / "mark"
    number = worker.call({"mark": str(mark)})
    worker.outputs(number, 2)
    worker.cancel(number)
    assert worker.finish(number).error.code == "cancelled"
    assert mark.read_text() == "closed"


KEPT = """
import asyncio, time


def _values():
    number = 0
    while True:
        yield number
        number += 1
        time.sleep(0.05)


async def fn(keep: int):
    return _values() if not keep else _kept(keep)


async def _kept(keep):
    jobs = [asyncio.ensure_future(asyncio.to_thread(time.sleep, 3.0)) for _ in range(keep)]
    yield "begun"
    await asyncio.gather(*jobs)
"""


def test_a_cancelled_iterator_does_not_wait_for_threads_that_others_keep(worker: Worker, tmp_path: Path) -> None:
    """Who ends 5 s after it was cancelled costs all other calls their worker."""
    worker.start(manifest("user:fn", "async_function"), bundle_of({"user.py": KEPT}), workdir=tmp_path)
    number = worker.call({"keep": 0})
    worker.outputs(number, 2)
    worker.outputs(worker.call({"keep": 150}), 1)
    worker.cancel(number)
    answer = worker.answers[number]
    worker.until(lambda: answer.end is not None, deadline_s=5.0)
    assert answer.error.code == "cancelled"
