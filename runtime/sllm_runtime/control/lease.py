"""Who leads, while it leads: the lease that its standbys watch, and the proof it needs itself before it acts.

What makes an old leader harmless are the fence of the store and the terms that nodes obey (``platform/state.py``). The
lease only says when another one should be elected; no clock of one process is compared with that of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Final

import msgspec

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.clock import since_boot
from sllm_runtime.platform.owned import Tasks, end
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import NoController, SllmError, StaleTerm, Unavailable
from sllm_runtime.protocol.limits import CONTROLLER_WAIT_S
from sllm_runtime.protocol.records import Lease, Term
from sllm_runtime.protocol.subjects import LEADER, LEASE_KEY

log = logging.getLogger(__name__)

RENEW_S: Final = 0.4
SURE_S: Final = 1.5
"""A leader that has not read or written its own term for so long does nothing until it has. Below
``standby.SILENT_S``."""
RELEASE_S: Final = 2.0


class Leadership:
    """One term of this controller. ``run`` until cancelled; it raises ``StaleTerm`` when another one leads.

    ``sure`` says that no other one had been elected SURE_S ago. A process that was stopped, or whose store is away,
    is not sure when it goes on; then it plans nothing, sends nothing and answers nothing until it is.
    """

    def __init__(
        self,
        store: StateStore,
        bus: Bus,
        controller: str,
        *,
        clock: Callable[[], float] = since_boot,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """``store`` is elected: what it says now is proof."""
        self._store, self._bus = store, bus
        self._lease = Lease(term=store.term, controller=controller)
        self._clock, self._pause = clock, pause
        self._proved = self._asked = clock()
        self._proof = asyncio.Event()
        self._stale = False
        """Whether another one was seen to lead."""
        self._tasks = Tasks("leadership")
        self._off = bus.on_reconnect(self._look)

    @property
    def sure(self) -> bool:
        """Whether this controller may act now."""
        return not self._stale and self._clock() - self._proved < SURE_S

    async def assured(self, within_s: float = CONTROLLER_WAIT_S) -> None:
        """Wait until it may act. Raises ``NoController`` after ``within_s`` seconds."""
        if self.sure:
            return
        try:
            async with asyncio.timeout(within_s):
                while not self.sure:
                    self._proof.clear()
                    await self._proof.wait()
        except TimeoutError as error:
            why = "the store of the state does not answer, so that it cannot know whether it still leads"
            raise NoController(f"the controller waits: {why}; try again") from error

    async def run(self) -> None:
        """Renew every RENEW_S, and tell everybody who leads."""
        await self._keep(self._tell)

    @contextlib.asynccontextmanager
    async def taking_over(self) -> AsyncIterator[None]:
        """Renewed meanwhile, and nobody is told: to read what is stored may take longer than a standby waits. Raises
        ``StaleTerm`` at the end if another one leads by then."""
        renewing = asyncio.create_task(self._keep(lambda: None), name="leadership: taking over")
        try:
            yield
        finally:
            await end((renewing,))
        if not renewing.cancelled() and (error := renewing.exception()) is not None:
            raise error

    async def _keep(self, tell: Callable[[], None]) -> None:
        """Renewed every RENEW_S. Raises ``StaleTerm``."""
        while True:
            tell()
            try:
                await self._renew()
            except Unavailable as error:
                log.info("the lease was not renewed: %s", error.message)
            else:
                self._prove(self._asked)
            await self._pause(RENEW_S)

    async def _renew(self) -> None:
        """Write it; where nothing can be written, reading is proof too. Raises ``StaleTerm``, ``Unavailable``."""
        self._lease = msgspec.structs.replace(self._lease, beat=self._lease.beat + 1)
        try:
            await self._store.put_once(LEASE_KEY, self._lease, self._asks)
        except Unavailable:
            self._asks()
            await self._store.confirm()

    def _asks(self) -> None:
        """The question leaves whose answer is proof: what was waited for before it, in vain or not, makes that no
        older."""
        self._asked = self._clock()

    def _prove(self, began: float) -> None:
        """It was so when the question left."""
        self._proved = max(self._proved, began)
        self._proof.set()

    def _tell(self) -> None:
        try:
            self._bus.publish_now(LEADER, Term(term=self._lease.term, controller=self._lease.controller))
        except SllmError as error:
            log.info("nobody heard who leads: %s", error.message)

    def _look(self) -> None:
        """NATS was away: look at once, not when what was in flight has timed out."""
        self._tasks.start(self._confirm(), "confirm")

    async def _confirm(self) -> None:
        began = self._clock()
        try:
            await self._store.confirm()
        except StaleTerm as error:  # the next renewal meets it again, and ends this term
            self._stale = True
            log.info("another controller leads: %s", error.message)
        except SllmError as error:
            log.info("not sure who leads: %s", error.message)
        else:
            self._prove(began)

    async def release(self) -> None:
        """An orderly end: another one may lead at once. Nothing is raised: without it they wait a little."""
        self._off()
        await self._tasks.close()
        if not self._bus.connected:
            return
        try:
            async with asyncio.timeout(RELEASE_S):
                await self._store.put_once(LEASE_KEY, msgspec.structs.replace(self._lease, released=True))
        except (SllmError, TimeoutError) as error:
            log.info("the lease was not released: %s", error)
