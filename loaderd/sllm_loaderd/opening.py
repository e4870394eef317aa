"""Work in a thread for a task that may be cancelled meanwhile: files that are opened, what has to come to its end."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def opened(action: Callable[[], T], give_back: Callable[[T], object]) -> T:
    """What ``action`` opens, in a thread.

    A thread cannot be cancelled: what it has opened by then, for whom nobody waits any more, goes to ``give_back``, in
    a thread too.
    """
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, contextvars.copy_context().run, action)

    def ended(opening: asyncio.Future[T]) -> None:
        if not opening.cancelled() and opening.exception() is None:
            loop.run_in_executor(None, give_back, opening.result())

    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(ended)
        raise


async def finished(action: Callable[[], T]) -> T:
    """What ``action`` returns or raises, in a thread. It is over when this returns or raises, however often the task is
    cancelled meanwhile: what comes next does not run beside it."""
    working = asyncio.ensure_future(asyncio.to_thread(action))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    failure = working.exception()
    if cancelled is not None:
        raise cancelled from failure
    return working.result()
