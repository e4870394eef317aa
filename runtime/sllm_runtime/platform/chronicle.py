"""What ``sllm up`` tells of its daemons: an event for each that it has started again, and why."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

from sllm_runtime.platform.announce import BURST, Announcer
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.events import Kind

log = logging.getLogger(__name__)

COMPONENT: Final = "platform"
AGAIN_S: Final = 1.0
LONGEST_S: Final = 60.0
"""What cannot be told is tried again after AGAIN_S, doubling up to this."""


class Chronicle:
    """Tells restarts. ``await run()`` until cancelled.

    Each time on a connection made for it, since NATS may be what was restarted; what cannot be told now is told later,
    at most BURST of it.
    """

    def __init__(
        self, connect: Callable[[], Awaitable[Bus]], wall: Callable[[], float] = time.time, again_s: float = AGAIN_S
    ) -> None:
        self._connect = connect
        self._wall = wall
        self._again_s = again_s
        self._reasons: dict[str, str] = {}
        self._waiting: deque[tuple[str, str, float]] = deque()
        self._wake = asyncio.Event()

    def because(self, daemon: str, reason: str) -> None:
        """The next restart of ``daemon`` is meant, for this reason."""
        self._reasons[daemon] = reason

    def restarted(self, daemon: str, end: str) -> None:
        """``daemon`` serves again, after a life that ended with ``end``."""
        reason = self._reasons.pop(daemon, f"it ended with {end}")
        if len(self._waiting) < BURST:
            self._waiting.append((daemon, f"{daemon} was started again: {reason}", self._wall()))
            self._wake.set()

    async def run(self) -> None:
        """Tell what there is to tell, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            pause = self._again_s
            while self._waiting:
                try:
                    await self._tell()
                except SllmError as error:
                    log.warning("restarts cannot be told as events now: %s", error.message)
                    await asyncio.sleep(pause)
                    pause = min(LONGEST_S, 2 * pause)

    async def _tell(self) -> None:
        """Everything that waits. Raises ``SllmError`` if it did not get there."""
        bus = await self._connect()
        try:
            announcer = Announcer(bus, COMPONENT, time.monotonic, self._wall)
            told = len(self._waiting)
            for daemon, message, at in list(self._waiting):
                announcer.tell(Kind.DAEMON_RESTARTED, message, {"daemon": daemon}, at=at)  # which may be long ago
            await bus.flush()
        finally:
            await bus.close()
        for _ in range(told):
            self._waiting.popleft()
