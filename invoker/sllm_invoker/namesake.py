"""Whether another node that lives has this one's name: both would run what either is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from sllm_runtime.protocol.errors import Conflict, SllmError
from sllm_runtime.protocol.limits import HEARTBEAT_S
from sllm_runtime.protocol.node import NodeStatus

LISTENS_S: Final = 10 * HEARTBEAT_S
"""So long a node listens, from its own beginning on: whoever lives reports every HEARTBEAT_S."""
APART_S: Final = 0.5 * HEARTBEAT_S
"""Reports that come no further apart may be the last ones of a life that is over: they waited somewhere, together."""


class Namesake:
    """Hears the reports under this name; ``found`` is told what is wrong, where this node is the one that goes."""

    def __init__(
        self, node: str, boot: str, since: float, clock: Callable[[], float], found: Callable[[SllmError], None]
    ) -> None:
        """``boot``, ``since``: of this life, as its reports say."""
        self._node, self._life, self._clock, self._found = node, (since, boot), clock, found
        self._listens = asyncio.Event()
        self.goes = False
        """Whether another one was found, and this one is to go."""
        self._first: dict[str, tuple[int, float]] = {}
        """Of each other life the first report that came: its number, and when."""
        self.takes_part = False
        """While it does not any other one stays; then the one that began first does, if both still listen."""

    def listens(self) -> None:
        """From now on reports come."""
        self._listens.set()

    async def sought(self, seconds: float) -> None:
        """Whoever lives has been heard when this returns, and again: one report of this life says that all instances
        of the other one are gone. ``seconds``: in which each that lives is heard; 0: nobody is looked for."""
        if not seconds:
            return
        await self._listens.wait()
        await asyncio.sleep(seconds)
        if self._first:
            await asyncio.sleep(seconds)

    def heard(self, status: NodeStatus, _subject: str) -> None:
        """A report: two of another life, one after the other in time, and it lives."""
        theirs = (status.since, status.boot)
        if status.boot == self._life[1] or (self.takes_part and self._life < theirs):
            return
        now = self._clock()
        sequence, at = self._first.setdefault(status.boot, (status.sequence, now))
        if status.sequence > sequence and now - at >= APART_S:
            self.goes = True
            self._found(
                Conflict(
                    f"another node is there under the name {self._node} (its life is {status.boot[:8]}): both would run"
                    " what either is told to. End that one, or give this one a name of its own:"
                    " `SLLM_NODE=NAME sllm up --node`"
                )
            )
