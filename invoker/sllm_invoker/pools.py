"""What a node keeps warm: a pool of sandboxes that any function may take, and for functions with an image or devices of
their own a pool of one sandbox each, which nobody else can use (``Wish``).

Those begin with the first start of their kind and end when others were asked for since, the longest unused first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from sllm_invoker.pool import WarmPool, sandbox_name
from sllm_invoker.sandbox import PLAIN, Sandbox, SandboxDriver, Wish
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import SllmError, Unavailable

log = logging.getLogger(__name__)

EACH: Final = 1
"""Sandboxes that wait of each kind beside the plain one."""


class WarmPools:
    """``size`` plain sandboxes wait, and one of each of at most ``kinds`` others. ``run`` keeps it so; ``acquire``
    takes one; ``close`` ends what nobody took."""

    def __init__(
        self,
        driver: SandboxDriver,
        size: int,
        *,
        kinds: int = 0,
        refill_delay_s: float = 0.3,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._driver = driver
        self._most = kinds if size else 0
        self._delay = refill_delay_s
        self._plain = WarmPool(driver, size, refill_delay_s=refill_delay_s, on_change=on_change)
        driver.on_complete(self._plain.renew)
        self._kinds: OrderedDict[Wish, WarmPool] = OrderedDict()
        """The one that was asked for last is the last."""
        self._running: dict[Wish, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._tasks = Tasks("warm pools")
        self._pressed = False
        self._closed = False

    @property
    def idle(self) -> int:
        """Warm sandboxes that any function may take."""
        return self._plain.idle

    @property
    def made_s(self) -> float:
        """Seconds in which the last of those was made; 0: none was."""
        return self._plain.made_s

    async def filled(self) -> None:
        """Wait until the plain pool was filled once, or could not be. The caller sets the deadline."""
        await self._plain.filled.wait()

    @property
    def others(self) -> dict[Wish, int]:
        """How many wait of each other kind."""
        return {wish: pool.idle for wish, pool in self._kinds.items()}

    @property
    def last_error(self) -> SllmError | None:
        """Why the last attempt to make a plain sandbox failed; None after a success."""
        return self._plain.last_error

    async def begun(self) -> None:
        """Wait until a sandbox could be begun: what all of them run from is there, or cannot be made now, which who
        asks for one is told."""
        with contextlib.suppress(SllmError):
            await self._driver.ready()

    async def acquire(self, wish: Wish = PLAIN) -> Sandbox:
        """A sandbox, now the caller's to close: a warm one, or the next one that becomes warm. Who wishes the network,
        or another one's, gets one that was made for it.

        Raises ``Unavailable``, at once where one of a kind of its own cannot be made. The caller sets the deadline.
        """
        if self._closed:
            raise Unavailable("this node is shutting down")
        if self._driver.serves(wish):
            return await self._plain.acquire()
        if wish.network or wish.cluster or self._most == 0:
            return await self._driver.create(sandbox_name(), wish)
        return await self._kind(wish).acquire()

    def _kind(self, wish: Wish) -> WarmPool:
        pool = self._kinds.get(wish)
        if pool is None:
            pool = WarmPool(self._driver, EACH, wish, patient=False, refill_delay_s=self._delay)
            pool.press(self._pressed)
            self._kinds[wish] = pool
            self._running[wish] = self._tasks.start(pool.run(), f"warm {wish}")
        self._kinds.move_to_end(wish)
        self._forget(len(self._kinds) - self._most)
        return pool

    def _forget(self, count: int) -> None:
        """End so many kinds that nobody asks for now. The last one is being asked for."""
        for wish, pool in list(self._kinds.items())[:-1]:
            if count > 0 and not pool.wanted:
                count -= 1
                del self._kinds[wish]
                self._running.pop(wish).cancel()
                ending = self._tasks.start(pool.close(), f"end {wish}")
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)

    def rest(self) -> None:
        """Calls move: none is made for nobody just now."""
        for pool in (self._plain, *self._kinds.values()):
            pool.rest()

    def press(self, on: bool) -> None:
        """Memory is short, or not any more: while it is, none waits."""
        self._pressed = on
        if on:
            log.warning("memory is short: %d warm sandboxes end", self.idle + sum(self.others.values()))
        for pool in (self._plain, *self._kinds.values()):
            pool.press(on)

    async def run(self) -> None:
        """Keep the plain ones there until cancelled."""
        await self._plain.run()

    async def close(self) -> None:
        """End every sandbox nobody took; those that wait for one get ``Unavailable``."""
        self._closed = True
        await asyncio.gather(*self._ending, *(pool.close() for pool in (self._plain, *self._kinds.values())))
        await self._tasks.close()
