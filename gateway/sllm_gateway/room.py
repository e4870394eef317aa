"""How much the streams of kept calls may still take: who begins leaves room for those who run, and no body takes what
all smaller ones would need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sllm_gateway.stored import Stored
from sllm_runtime.protocol.errors import StoreFull
from sllm_runtime.protocol.limits import MIB

FOR_ANSWERS: Final = 1 / 4
"""Of a stream: what new calls leave to those that run."""
FOR_ENDS: Final = 1 / 8
"""What the answers of those leave to their ends, and what new keys leave to those that stand."""
LOOK_S: Final = 1.0
"""How often a stream is looked at that is not half full."""


@dataclass(frozen=True)
class Level:
    """How full a stream is, in bytes. ``limit`` of one that has none: 0 or less."""

    used: int
    limit: int

    def takes(self, nbytes: int, share: float | None = None) -> bool:
        """Whether ``nbytes`` leave this share of all that it may hold; None: as much again."""
        leave = nbytes if share is None else self.limit * share
        return self.limit <= 0 or self.limit - self.used - nbytes >= leave

    @property
    def low(self) -> bool:
        """Whether it is far from full."""
        return self.limit <= 0 or 2 * self.used < self.limit


class Room:
    """All of these streams. What this gateway writes is counted; one that fills up is looked at for every message."""

    def __init__(self, stored: Stored, clock: Callable[[], float]) -> None:
        self._stored, self._clock = stored, clock
        self._levels: dict[str, tuple[float, Level]] = {}

    async def require(self, stream: str, nbytes: int, share: float | None = None) -> None:
        """Before so much is written. Raises ``StoreFull`` where it does not take it (see ``Level.takes``);
        ``Unavailable`` as ``Stored``."""
        now = self._clock()
        looked, level = self._levels.get(stream, (-LOOK_S, Level(0, 0)))
        if now - looked >= LOOK_S or not level.low or not level.takes(nbytes, share):
            looked, level = now, Level(*await self._stored.size(stream))
        if not level.takes(nbytes, share):
            raise StoreFull(
                f"{stream} holds {level.used / MIB:.1f} of {level.limit / MIB:.1f} MiB of calls that are kept, and"
                f" {'a body may take half of what is left' if share is None else 'what is left is for those that run'};"
                " call again when others have ended"
            )
        self._levels[stream] = (looked, Level(level.used + nbytes, level.limit))
