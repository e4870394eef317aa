"""Who has left NATS, by its own word: a request to a subject that nobody listens to is answered by its server, at once.

Silence has to last for LOST_AFTER_S until it tells: a process that stands still may go on, and one that reconnects is
silent as well. A process that was killed, or whose machine was shut down, is not connected any more, which the servers
know within milliseconds. So whoever is overdue is asked for, again and again; who was not there for LEFT_S will not be,
since one that lives is connected again by then. After a connection of our own was made nobody is asked for: then all of
them may be on their way. A machine that loses its power or its network says no more to the servers than to us: that
takes its time as before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

import msgspec

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.limits import LOST_AFTER_S

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Between two looks; also the longest wait for the server's word. Who is there need not answer."""
LEFT_S: Final = 1.5
"""Longer than a server that cannot be reached is tried (``connection.CONNECT_S``) before the next one, and than two
servers of a cluster take to join again after their connection broke (1.1 s)."""
SETTLE_S: Final = LOST_AFTER_S
APART_S: Final = 4 * LOOK_S
"""Two looks that are further apart than this do not belong together: who looks did not run, nor, on the same machine,
who was to come again."""
MOST: Final = 256
"""Of one look."""
NOTHING: Final = msgspec.Raw(b"")
"""A question that whoever answers requests refuses to read."""


class Absences:
    """Since when who was not there. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._looked = 0.0
        self._turn = 0

    def next(self, overdue: Collection[str], most: int) -> list[str]:
        """Of those who are ``overdue`` whom to ask for now: who was not there, then the others in turn."""
        absent = [name for name in overdue if name in self._since]
        others = [name for name in overdue if name not in self._since]
        room = max(0, most - len(absent))
        start = self._turn % len(others) if others else 0
        self._turn += room
        return [*absent, *(others[start:] + others[:start])[:room]][:most]

    def take(self, there: Mapping[str, bool], now: float) -> list[str]:
        """One look: of each that was asked for, whether it was there. Returns those who have left: in each look of the
        last LEFT_S they were asked for and not there."""
        if now - self._looked > APART_S:
            self._since.clear()
        self._looked = now
        self._since = {name: self._since.get(name, now) for name, found in there.items() if not found}
        return [name for name, since in self._since.items() if now - since >= LEFT_S]


class Presence:
    """Asks for those who are ``overdue``, from ``start`` to ``close``, and tells of each that it has ``left``.

    ``subject`` of a name is one that it alone listens to, ``question`` a message there from which nothing follows.
    """

    def __init__(
        self,
        bus: Bus,
        subject: Callable[[str], str],
        question: Any,
        overdue: Callable[[], Collection[str]],
        left: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bus, self._subject, self._question = bus, subject, question
        self._overdue, self._left = overdue, left
        self._clock, self._pause = clock, pause
        self._absences = Absences()
        self._tasks = Tasks("presence")
        self._settled = clock() + SETTLE_S
        """Nobody is asked for until then."""
        self._forget = bus.on_reconnect(self._reconnected)

    def start(self) -> None:
        self._tasks.start(self._run(), "looks")

    async def close(self) -> None:
        """Repeatable."""
        self._forget()
        await self._tasks.close()

    def _reconnected(self) -> None:
        self._settled = self._clock() + SETTLE_S

    async def _run(self) -> None:
        while True:
            await self._pause(LOOK_S)
            try:
                await self.look()
            except Exception:  # what one verdict breaks keeps nobody else from theirs
                log.exception("looking for those who have left failed")

    async def look(self) -> None:
        """Ask for all who are overdue, together."""
        names = self._absences.next(self._overdue(), MOST) if self._clock() >= self._settled else []
        found = await asyncio.gather(*(self._there(name) for name in names))
        left = self._absences.take(dict(zip(names, found, strict=True)), self._clock())
        for name in set(left) & set(self._overdue()) if left else ():  # one may have come again just now
            self._left(name)

    async def _there(self, name: str) -> bool:
        return await self._bus.served(self._subject(name), self._question, timeout_s=LOOK_S)
