"""Threads of the platform's own: those of ``asyncio.to_thread`` are the function's, which may keep all of them."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MOST: Final = 8
"""Threads at once: each has a stack, which the function's memory counts. No more wait than the instance has calls."""


class _Threads:
    """They end when nothing waits, and the process does not wait for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[Callable[[], None]] = deque()
        self._working = 0

    def start(self, job: Callable[[], None]) -> None:
        """Raises ``RuntimeError`` where no thread can be had."""
        with self._lock:
            self._waiting.append(job)
            if self._working == MOST:
                return
            self._working += 1
        try:
            threading.Thread(target=self._work, name="aside", daemon=True).start()
        except BaseException:
            with self._lock:
                self._working -= 1
                if job in self._waiting:
                    self._waiting.remove(job)
            raise

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._working -= 1
                    return
                job = self._waiting.popleft()
            job()


_THREADS: Final = _Threads()


async def aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``asyncio.to_thread``, in a thread that no function can keep."""
    call = functools.partial(contextvars.copy_context().run, function, *args, **kwargs)
    done: Future[T] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return  # nobody waits for it any more; who goes later leaves a thread that ends by itself
        try:
            result = call()
        except BaseException as error:  # it is raised where that is waited for
            done.set_exception(error)
        else:
            done.set_result(result)

    _THREADS.start(run)
    return await asyncio.wrap_future(done)
