"""Who has left NATS, by its own word: a request to a subject that nobody listens to is answered by its server, at once.

Silence has to last for LOST_AFTER_S until it tells: a process that stands still may go on, and one that reconnects is
silent as well. A process that was killed, or whose machine was shut down, is not connected any more, which the servers
know within milliseconds. So whoever is overdue is asked for, again and again; who was not there for LEFT_S will not be,
since one that lives connects again every quarter of a second. After a reconnect of our own nobody is asked for: then
all of them reconnect. A machine that loses its power or its network says no more to the servers than to us: that takes
its time as before.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import islice
from typing import Any, Final

import msgspec

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.limits import LOST_AFTER_S, STALL_S

LOOK_S: Final = 0.25
"""Between two looks; also the longest wait for the server's word. Who is there need not answer."""
LEFT_S: Final = 1.0
"""Several tries to connect again, at a server of a cluster that lives."""
MOST: Final = 256
"""Of one look. The others have their turn when these have left."""
NOTHING: Final = msgspec.Raw(b"")
"""A question that whoever answers requests refuses to read."""


class Absences:
    """Since when who was not there. Pure."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._looked = 0.0

    def take(self, there: Mapping[str, bool], now: float) -> list[str]:
        """One look: of each that was asked for, whether it was there. Returns those who have left: in each look of the
        last LEFT_S they were asked for and not there. Where nobody looked for STALL_S they had no time to come again
        either, if this machine stood still: that counts anew."""
        if now - self._looked > STALL_S:
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
        overdue: Callable[[], Iterable[str]],
        left: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._bus, self._subject, self._question = bus, subject, question
        self._overdue, self._left = overdue, left
        self._clock, self._pause = clock, pause
        self._absences = Absences()
        self._tasks = Tasks("presence")
        self._settled = clock()
        """Nobody is asked for until then."""
        self._forget = bus.on_reconnect(self._reconnected)

    def start(self) -> None:
        self._tasks.start(self._run(), "looks")

    async def close(self) -> None:
        """Repeatable."""
        self._forget()
        await self._tasks.close()

    def _reconnected(self) -> None:
        self._settled = self._clock() + LOST_AFTER_S

    async def _run(self) -> None:
        while True:
            await self._pause(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Ask for all who are overdue, together."""
        names = list(islice(self._overdue(), MOST)) if self._clock() >= self._settled else []
        found = await asyncio.gather(*(self._there(name) for name in names))
        left = self._absences.take(dict(zip(names, found, strict=True)), self._clock())
        for name in set(left) & set(self._overdue()) if left else ():  # one may have come again just now
            self._left(name)

    async def _there(self, name: str) -> bool:
        return await self._bus.served(self._subject(name), self._question, timeout_s=LOOK_S)
