"""A warm pool: sandboxes of one kind that are made before anyone asks, each used once.

A start never waits for the pool to be full: it takes a warm sandbox, or the next one that becomes warm. Refilling
waits a moment after a start, so that on few cores it does not take time from the very start that emptied the pool; and
while calls move, whose callers would see it (``rest``).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Callable
from typing import Final

from sllm_invoker.sandbox import PLAIN, Sandbox, SandboxDriver, Wish
from sllm_runtime.protocol.errors import SllmError, Unavailable

log = logging.getLogger(__name__)

MAX_FORKS: Final = 4
"""Sandboxes that are being made at one time."""
RESTS_S: Final = 5.0
"""Who refills nothing while calls move does so for no longer since it was full."""
BACKOFF_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
CLOSE_S: Final = 10.0


class WarmPool:
    """``size`` sandboxes that wait. ``run`` keeps it so; ``acquire`` takes one; ``close`` ends what nobody took.

    ``patient``: who waits for a sandbox goes on waiting when one cannot be made. Else it is told why, and until one
    could be made the pool makes none that nobody waits for.
    """

    def __init__(
        self,
        driver: SandboxDriver,
        size: int,
        wish: Wish = PLAIN,
        *,
        patient: bool = True,
        refill_delay_s: float = 0.3,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = driver
        self._size = size
        self._wish = wish
        self._patient = patient
        self._pressed = False
        self._delay = refill_delay_s
        self._on_change = on_change
        self._idle: deque[Sandbox] = deque()
        self._old: deque[Sandbox] = deque()
        """They wait, too, until others have been made in their place."""
        self._waiters: deque[asyncio.Future[Sandbox]] = deque()
        self._making: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._quiet_until = 0.0
        self._full_at = 0.0
        self._failures = 0
        self._retry_at = 0.0
        self._closed = False
        self.filled = asyncio.Event()
        """Set once as many wait as shall, or none can be made: the node has begun."""
        self.last_error: SllmError | None = None
        """Why the last attempt to make a sandbox failed; None after a success."""
        self.made_s = 0.0
        """Seconds in which the last one was made, once one could be begun; 0: none was."""

    @property
    def idle(self) -> int:
        """Warm sandboxes that wait."""
        return len(self._idle) + len(self._old)

    @property
    def wanted(self) -> bool:
        """Whether somebody waits for a sandbox."""
        return any(not waiter.done() for waiter in self._waiters)

    async def acquire(self) -> Sandbox:
        """A warm sandbox, now the caller's to close. Waits for the one being made if none is idle.

        Raises ``Unavailable`` when the pool is closed, and where it is not patient. The caller sets the deadline.
        """
        if self._closed:
            raise Unavailable("this node is shutting down")
        loop = asyncio.get_running_loop()
        now = loop.time()
        if len(self._idle) >= self._size:
            self._full_at = now
        self._quiet_until = now + self._delay
        while waiting := self._idle or self._old:
            sandbox = waiting.popleft()
            self._changed()
            if _lives(sandbox):
                return sandbox
            self._discard(sandbox)
        waiter: asyncio.Future[Sandbox] = loop.create_future()
        self._waiters.append(waiter)
        self._wake.set()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._put(waiter.result())  # it came in the moment we were cancelled
            raise

    def rest(self) -> None:
        """Calls are on their way to or from an instance here: one more sandbox than there are is made a moment later,
        within RESTS_S."""
        if not self.idle:
            return
        until = min(asyncio.get_running_loop().time() + self._delay, self._full_at + RESTS_S)
        self._quiet_until = max(self._quiet_until, until)

    def press(self, on: bool) -> None:
        """Memory is short: none waits until it is not. Who asks for a sandbox gets one."""
        self._pressed = on
        if on:
            self._discard_all()
        self._changed()

    def renew(self) -> None:
        """Starts in sandboxes that are made from now on are quicker: those that wait are replaced, one by one."""
        self._old.extend(self._idle)
        self._idle.clear()
        self._wake.set()

    async def run(self) -> None:
        """Keep the pool filled until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            now = loop.time()
            if len(self._idle) >= self._size:
                self.filled.set()
            missing = self._missing(now)
            if missing and now >= self._retry_at and len(self._making) < MAX_FORKS:
                task = asyncio.create_task(self._make(), name="make-sandbox")
                self._making.add(task)
                task.add_done_callback(self._made)
                continue
            wake_at = max(self._retry_at, self._quiet_until)
            timeout = max(0.001, wake_at - now) if wake_at > now else None
            try:
                async with asyncio.timeout(timeout):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _missing(self, now: float) -> int:
        if self._closed:
            return 0
        self._waiters = deque(waiter for waiter in self._waiters if not waiter.done())
        ready = now >= self._quiet_until and not self._pressed and (self._patient or not self._failures)
        size = self._size if ready else 0
        return max(0, size + len(self._waiters) - len(self._idle) - len(self._making))

    async def _make(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            await self._driver.ready(self._wish)
            began = loop.time()
            sandbox = await self._driver.create(sandbox_name(), self._wish)
        except (SllmError, OSError) as raised:  # a full disk, no descriptors
            said = str(raised) or type(raised).__name__
            error = raised if isinstance(raised, SllmError) else Unavailable(f"no sandbox can be made: {said}")
            if not self._patient:
                self._refuse(error)
                return
            delay = BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
            self._failures += 1
            self.last_error = error
            self.filled.set()
            self._retry_at = loop.time() + delay
            log.warning("no sandbox could be made, trying again in %.1f s: %s", delay, error.message)
            return
        self._failures, self.last_error, self.made_s = 0, None, loop.time() - began
        sandbox.exited.add_done_callback(lambda _future: self._died(sandbox))
        self._put(sandbox)

    def _refuse(self, error: SllmError) -> None:
        """Whoever waits longest learns why the sandbox that was made for it became none."""
        self._failures, self.last_error = self._failures + 1, error
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
                return

    def _made(self, task: asyncio.Task[None]) -> None:
        self._making.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("making a sandbox failed", exc_info=error)
            self._retry_at = asyncio.get_running_loop().time() + BACKOFF_S[-1]
        self._wake.set()

    def _put(self, sandbox: Sandbox) -> None:
        if self._closed or not _lives(sandbox):
            self._discard(sandbox)
            return
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(sandbox)
                return
        if self._pressed or len(self._idle) >= self._size:  # it was made for one who waits no longer
            self._discard(sandbox)
            return
        self._idle.append(sandbox)
        if self._old:
            self._discard(self._old.popleft())
        self._changed()

    def _died(self, sandbox: Sandbox) -> None:
        """A worker that died while it waited: its owner is the pool."""
        for waiting in (self._idle, self._old):
            if sandbox in waiting:
                waiting.remove(sandbox)
                log.warning("warm sandbox %s died: %s", sandbox.name, sandbox.exited.result())
                self._discard(sandbox)
                self._changed()

    def _discard_all(self) -> None:
        for waiting in (self._idle, self._old):
            while waiting:
                self._discard(waiting.popleft())

    def _discard(self, sandbox: Sandbox) -> None:
        task = asyncio.create_task(_close(sandbox), name="close-sandbox")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _changed(self) -> None:
        self._wake.set()
        self._on_change()

    async def close(self) -> None:
        """End every sandbox nobody took; those that wait for one get ``Unavailable``."""
        self._closed = True
        for task in self._making:
            task.cancel()
        await asyncio.gather(*self._making, return_exceptions=True)
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(Unavailable("this node is shutting down"))
        self._discard_all()
        await asyncio.gather(*self._closing, return_exceptions=True)


def sandbox_name() -> str:
    """Unique on this node, over all its lives."""
    return f"sb-{uuid.uuid4().hex[:12]}"


def _lives(sandbox: Sandbox) -> bool:
    """Not dead: neither known how (``exited``) nor still to be told."""
    return sandbox.pid != 0 and not sandbox.exited.done()


async def _close(sandbox: Sandbox) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await sandbox.close()
    except TimeoutError:
        log.error("sandbox %s (pid %d) did not end within %.0f s", sandbox.name, sandbox.pid, CLOSE_S)
