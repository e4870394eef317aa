"""What ``sllm up`` ends by, and what it adopts meanwhile: signals, and processes that lost their parent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, Final

from sllm_runtime.platform.daemon import FORCED
from sllm_runtime.platform.process import end_orphans
from sllm_runtime.platform.supervise import Supervisor
from sllm_runtime.protocol.errors import InternalError, SllmError, StartFailed, Unavailable

log = logging.getLogger(__name__)

_ORPHANS_EVERY_S: Final = 1.0
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stop:
    """SIGTERM, SIGINT and SIGHUP set ``asked``; a second one ends at once, and the kernel our children with us."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.signal: int | None = None

    @property
    def status(self) -> int:
        """The exit status: 130 after Ctrl-C, otherwise 0."""
        return 128 + signal.SIGINT if self.signal == signal.SIGINT else 0

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """While it lasts."""
        loop = asyncio.get_running_loop()

        def asked(number: int) -> None:
            if self.asked.is_set():
                os._exit(FORCED)
            self.signal = number
            self.asked.set()

        heard = [number for number in _SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
        for number in heard:  # under nohup the end of the terminal is not meant to be its own
            loop.add_signal_handler(number, asked, number)
        try:
            yield
        finally:
            for number in heard:
                loop.remove_signal_handler(number)


async def reap(supervisor: Supervisor, others: Callable[[], set[int]] = set) -> None:
    """End what lost its parent and came to us (subreaper), until cancelled: nothing of that kind may go on, but
    ``others``."""
    died = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGCHLD, died.set)
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_ORPHANS_EVERY_S):
                    await died.wait()
            died.clear()
            ended = end_orphans(set(supervisor.pids().values()) | others())
            if ended:
                log.info("ended %d processes that had lost their parent", ended)
    finally:
        loop.remove_signal_handler(signal.SIGCHLD)


async def keep(
    supervisor: Supervisor, stop: Stop, start: Coroutine[Any, Any, None], started: Callable[[], Awaitable[None]]
) -> None:
    """``start``, then ``started``, then wait until ``stop``. Raises what ``start`` does; ``StartFailed`` or
    ``Unavailable`` for a child that cannot be kept."""
    stopping: asyncio.Future[Any] = asyncio.ensure_future(stop.asked.wait())
    starting: asyncio.Future[Any] = asyncio.ensure_future(start)
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        await starting
        await started()
        failed: asyncio.Future[Any] = supervisor.failed
        await asyncio.wait([failed, stopping], return_when=asyncio.FIRST_COMPLETED)
        if supervisor.failed.done():
            raise _given_up(supervisor.failed.result())
    finally:
        for task in (starting, stopping):
            task.cancel()
        await asyncio.wait([starting, stopping])


def _given_up(error: BaseException) -> SllmError:
    if isinstance(error, StartFailed | Unavailable):
        return error
    return InternalError(f"the supervisor failed: {type(error).__name__}: {error}")
