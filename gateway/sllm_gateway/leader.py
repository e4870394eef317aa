"""The leading controller as this gateway hears of it: what was asked of one that is gone is asked of the next."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, TypeVar

import msgspec

from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import DeadlineExceeded
from sllm_runtime.protocol.limits import RPC_TIMEOUT_S
from sllm_runtime.protocol.records import Term

log = logging.getLogger(__name__)

R = TypeVar("R", bound=msgspec.Struct)


class Leader:
    """Asks whoever leads. ``start`` before use; without it questions only wait for their answers."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._term = 0
        self._another = asyncio.Event()
        """Set, and replaced by a new one, when another controller leads."""
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen. Raises ``Unavailable``."""
        self._subscription = await self._bus.subscribe(subjects.LEADER, Term, self._heard)

    async def close(self) -> None:
        """Listen no longer. Repeatable."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    def _heard(self, leads: Term, _subject: str) -> None:
        if leads.term <= self._term:
            return
        log.info("controller %s leads with term %d", leads.controller, leads.term)
        self._term = leads.term
        another, self._another = self._another, asyncio.Event()
        another.set()

    async def ask(self, verb: str, request: Any, reply: type[R], *, timeout_s: float = RPC_TIMEOUT_S) -> R:
        """The answer, of the next leader where another one takes over meanwhile. Raises what the controller raises,
        ``Unavailable`` if none serves, ``DeadlineExceeded`` after ``timeout_s`` seconds."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (left := deadline - loop.time()) > 0:
            another = asyncio.ensure_future(self._another.wait())
            asking = asyncio.ensure_future(self._bus.call(subjects.ctl(verb), request, reply, timeout_s=left))
            try:
                await asyncio.wait({another, asking}, return_when=asyncio.FIRST_COMPLETED)
                if asking.done():
                    return asking.result()
            finally:
                another.cancel()
                asking.cancel()
                await asyncio.wait({another, asking})
        raise DeadlineExceeded(f"no answer from {subjects.ctl(verb)} within {timeout_s:g} s")
