"""What functions may do to their worker: use up its memory, keep its threads, leave its loop, or fork on it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.worker.harness import Worker, bundle_of, manifest
from tests.unit.worker.test_functions import gone

LENGTH = "def fn(text: str):\n    return len(text)\n"


def test_bodies_beyond_the_memory_end_their_calls(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": LENGTH}), workdir=tmp_path, memory_limit=2**26)
    body = b'{"text": "' + b"a" * (32 * 2**20 - 100) + b'"}'
    worker.wire.sock.settimeout(10)  # it reads what it is sent
    numbers = [worker.call(body=body) for _ in range(2)]
    worker.until(lambda: all(worker.answers[n].end for n in numbers) or worker.failed is not None, 20)
    if worker.failed is None:  # else its invoker ends it
        assert worker.run({"text": "a"}).outputs == [1]


KEEPS = """
import asyncio, time

async def fn(seconds: float = 0.0):
    await asyncio.to_thread(time.sleep, seconds)
    return seconds
"""


def test_a_thread_that_a_cancelled_call_left_does_not_keep_its_instance(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(kind="async_function"), bundle_of({"user.py": KEEPS}), workdir=tmp_path)
    number = worker.call({"seconds": 30.0})
    time.sleep(0.3)
    worker.cancel(number)
    assert worker.finish(number).error.code == "cancelled"
    began = time.monotonic()
    worker.stop(grace_s=60.0)
    worker.wait_dead()
    assert time.monotonic() - began < 10


def test_threads_that_a_function_keeps_are_not_the_platforms(
    worker: Worker, loader: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    made = manifest(kind="async_function", model="m", engine=True)
    worker.start(made, bundle_of({"user.py": KEEPS}), workdir=tmp_path, session=loader.grant(models("llama")))
    kept = [worker.call({"seconds": 30.0}) for _ in range(min(32, (os.cpu_count() or 1) + 4))]
    time.sleep(0.3)
    for number in kept:  # their callers have gone, the threads are there
        worker.cancel(number)
        assert worker.finish(number).error.code == "cancelled"
    number = worker.call({"prompt": "def f", "max_tokens": 4}, kind="completion")
    worker.until(lambda: worker.answers[number].end is not None, 15)
    assert worker.answers[number].end.error is None  # type: ignore[union-attr]


EXITS = """
import asyncio, sys

async def stops():
    await asyncio.sleep(0.1)
    sys.exit("enough")

async def fn(exits: bool = False):
    if exits:
        await asyncio.gather(stops(), asyncio.sleep(5))
    await asyncio.sleep(1)
    return 1
"""


def test_sys_exit_in_a_task_ends_the_call_alone(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(kind="async_function"), bundle_of({"user.py": EXITS}), workdir=tmp_path)
    other = worker.call()
    error = worker.run({"exits": True}).error
    assert (error.code, error.message) == ("function_error", "SystemExit: enough")
    assert worker.finish(other).outputs == [1]
    assert worker.run().outputs == [1]


OWN_LOOP = """
import asyncio

def fn(model, prompt: str):
    async def one(count):
        return "".join([piece async for piece in model.agenerate(prompt, max_tokens=count)])
    async def both():
        return await asyncio.gather(one(4), one(8))
    return asyncio.run(both())
"""


def test_a_function_may_generate_on_a_loop_of_its_own(
    worker: Worker, loader: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    made = manifest(model="m", engine=True)
    worker.start(made, bundle_of({"user.py": OWN_LOOP}), workdir=tmp_path, session=loader.grant(models("llama")))
    number = worker.call({"prompt": "def f"})
    worker.until(lambda: worker.answers[number].end is not None, 15)
    (texts,) = worker.answers[number].outputs
    assert texts[1].startswith(texts[0])


FORKS = """
import asyncio, os

async def fn(seconds: float = 0.0, waits: bool = False):
    if seconds:
        await asyncio.sleep(seconds)
        with open("slept", "a") as file:
            print(os.getpid(), file=file)
        return seconds
    child = os.fork()
    if not child and waits:
        await asyncio.get_event_loop().create_future()
    return child
"""


@pytest.mark.parametrize("waits", [False, True])
def test_a_child_that_an_async_function_forks_leaves_its_worker_alone(
    worker: Worker, tmp_path: Path, waits: bool
) -> None:
    worker.start(manifest(kind="async_function"), bundle_of({"user.py": FORKS}), workdir=tmp_path)
    other = worker.call({"seconds": 0.5})
    (child,) = worker.run({"waits": waits}).outputs
    assert worker.finish(other).outputs == [0.5]
    assert gone(child, 5), "it lives on in its parent's loop"
    for _ in range(20):
        number = worker.call({"seconds": 0.01})
        worker.until(lambda number=number: worker.answers[number].end is not None, 10)  # type: ignore[misc]
        assert worker.answers[number].outputs == [0.01]
    assert len((tmp_path / "code" / "slept").read_text().split()) == 21


FLOODS = """
def fn(count: int):
    for _ in range(count // 1000):
        print("\\n" * 999)
    return int(open("/proc/self/statm").read().split()[1]) * 4096
"""


def test_empty_lines_that_nobody_takes_are_bounded(worker: Worker, tmp_path: Path) -> None:
    """The invoker is slow: it reads nothing until they are written."""
    worker.start(manifest(), bundle_of({"user.py": FLOODS}), workdir=tmp_path)
    (before,) = worker.run({"count": 0}).outputs
    number = worker.call({"count": 600_000})
    time.sleep(6)
    (after,) = worker.finish(number).outputs
    assert after - before < 32 * 2**20
    assert any("lines dropped" in log.text for log in worker.logs)


SLEEPS = """
import time

def fn(seconds: float = 0.0):
    time.sleep(seconds)
    return seconds
"""
THREADS = """
import threading, time

def fn(count: int):
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(5,), daemon=True).start()
"""


def test_calls_whose_threads_have_no_room_are_told_so(worker: Worker, tmp_path: Path) -> None:
    """Each has a stack of 8 MiB, of which the limit counts all."""
    worker.start(manifest(), bundle_of({"user.py": SLEEPS}), workdir=tmp_path, memory_limit=2**27)
    answers = [worker.answers[worker.call({"seconds": 3.0})] for _ in range(32)]
    worker.until(lambda: all(answer.end for answer in answers))
    refused = [answer.error.message for answer in answers if answer.end is not None and answer.end.error is not None]
    assert refused
    assert all("can't start new thread" in message and "raise memory=" in message for message in refused)
    assert worker.run({"seconds": 0.0}).outputs == [0]


def test_a_function_that_has_no_room_for_its_threads_is_told_so(worker: Worker, tmp_path: Path) -> None:
    worker.start(manifest(), bundle_of({"user.py": THREADS}), workdir=tmp_path, memory_limit=2**27)
    message = worker.run({"count": 32}).error.message
    assert "can't start new thread" in message
    assert "raise memory=" in message
