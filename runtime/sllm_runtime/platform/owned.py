"""Tasks that live longer than one function: each has an owner that sees its failure and ends it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Final, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S: Final = 30.0
"""Longer than any task's orderly end takes: processes that are stopped have seconds of grace."""
_AGAIN_S: Final = 1.0


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel ``tasks`` until all have ended: one that swallows its cancellation (on Python 3.11 a request that is
    answered as it is cancelled) is cancelled again."""
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=3 * _AGAIN_S)  # their own `close` needs some rounds


async def each(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """``work`` on every one of ``items``, begun in their order, ``at_once`` of them together. The first that raises
    ends the others, and is what this raises."""
    left = iter(items)

    async def some() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class Tasks:
    """Owner of tasks outside a ``TaskGroup``. A task that dies is logged and told to ``on_failure``.

    ``close`` must be called by whoever made this owner; afterwards nothing can be started.
    """

    def __init__(self, owner: str, on_failure: Callable[[BaseException], None] | None = None) -> None:
        self._owner = owner
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, coroutine: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run ``coroutine``. Raises ``RuntimeError`` after ``close``."""
        if self._closed:
            coroutine.close()
            raise RuntimeError(f"{self._owner} is closed; it cannot start {name}")
        task = asyncio.get_running_loop().create_task(coroutine, name=f"{self._owner}: {name}")
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        log.error("task %s failed", task.get_name(), exc_info=error)
        if self._on_failure is not None:
            self._on_failure(error)

    async def close(self, within_s: float = CLOSE_S) -> None:
        """Cancel all tasks and wait until they have ended. Repeatable; the calling task, if owned, is left out.

        What goes on all the same after ``within_s`` seconds is named in the log and left.
        """
        self._closed = True
        current = asyncio.current_task()
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while left := [task for task in self._tasks if task is not current]:
            if loop.time() >= until:
                names = ", ".join(sorted(task.get_name() for task in left))
                log.error("given up %g s after they were cancelled: %s", within_s, names)
                return
            for task in left:
                task.cancel()
            # One that swallows its cancellation once (a library's cleanup) is cancelled again in the next round.
            await asyncio.wait(left, timeout=max(0.0, min(_AGAIN_S, until - loop.time())))
