"""The leading controller as this gateway hears of it: what was asked of one that is gone is asked of the next."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.platform.requests import Unserved
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import DeadlineExceeded, NoController, Unavailable
from sllm_runtime.protocol.limits import RPC_TIMEOUT_S
from sllm_runtime.protocol.records import Term

log = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)

AGAIN_S: Final = 0.25
"""Who leads says so; that it serves again after its connection was gone nobody says."""


LEADS_S: Final = 3.0
"""Who leads says so every 0.4 s, and another one takes over within this."""


class Leader:
    """Asks whoever leads. ``start`` before use; without it questions only wait for their answers."""

    def __init__(self, bus: Bus, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._clock = clock
        self._term = 0
        self._said = -math.inf
        """When it last said that it leads."""
        self._another = asyncio.Event()
        """Set, and replaced by a new one, when another controller leads, or answers may have been lost."""
        self._subscription: Subscription | None = None
        self._off = bus.on_reconnect(self._ask_again)

    async def start(self) -> None:
        """Listen. Raises ``Unavailable``."""
        self._subscription = await self._bus.subscribe(subjects.LEADER, Term, self._heard)

    async def close(self) -> None:
        """Listen no longer. Repeatable."""
        self._off()
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    @property
    def leads(self) -> bool:
        """Whether one leads, as far as this gateway hears."""
        return self._clock() - self._said < LEADS_S

    def _heard(self, leads: Term, _subject: str) -> None:
        if leads.term >= self._term:
            self._said = self._clock()
        if leads.term <= self._term:
            return
        log.info("controller %s leads with term %d", leads.controller, leads.term)
        self._term = leads.term
        self._ask_again()

    def _ask_again(self) -> None:
        another, self._another = self._another, asyncio.Event()
        another.set()

    async def ask(
        self, verb: str, request: Any, reply: type[R], *, timeout_s: float = RPC_TIMEOUT_S, wait_s: float = 0.0
    ) -> R:
        """The answer within ``timeout_s`` seconds, of the next leader where another one takes over meanwhile; for
        ``wait_s`` of them one that serves is waited for. Raises what the controller raises, ``Unserved`` if none
        serves, ``DeadlineExceeded``."""
        loop = asyncio.get_running_loop()
        began, heard = loop.time(), False
        while (left := began + timeout_s - loop.time()) > 0:
            if isinstance(request, ctl.Ending) and request.again:
                request = msgspec.structs.replace(request, age_s=loop.time() - began)
            another = asyncio.ensure_future(self._another.wait())
            asking = asyncio.ensure_future(self._bus.call(subjects.ctl(verb), request, reply, timeout_s=left))
            try:
                await asyncio.wait({another, asking}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
                heard = True  # by the one before, for all that is known
                if isinstance(request, ctl.Ending):  # the one before may have done it
                    request = msgspec.structs.replace(request, again=True)
            except Unserved:
                if loop.time() - began >= wait_s:
                    if heard:
                        break
                    raise
                await asyncio.wait({another}, timeout=min(AGAIN_S, left))
            except Unavailable as error:  # the next one did not do it
                if not heard or not isinstance(request, ctl.Rollback) or isinstance(error, NoController):
                    raise
                raise DeadlineExceeded(f"none of who heard it first; then: {error.message}") from error
            finally:
                another.cancel()
                asking.cancel()
                await asyncio.wait({another, asking})
        raise DeadlineExceeded(f"no answer from {subjects.ctl(verb)} within {loop.time() - began:.3g} s")
