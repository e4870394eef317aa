"""Whether a path has just failed, and is left alone for a while where another one would do. Pure; time is handed in."""

from __future__ import annotations

import math
from typing import Final

FIRST_S: Final = 30.0
LONGEST_S: Final = 600.0
"""A path that is down, or cut off from this node alone, costs a load what it takes to find that out once in so long."""


class Doubt:
    """Of one path: for ``FIRST_S`` after a failure, twice as long after each that follows, until something comes."""

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until = -math.inf

    def failed(self, now: float) -> bool:
        """What was read by it has failed as if it were down. Whether it was in no doubt: what was under way with the
        first that fails does so likewise."""
        if self.holds(now):
            return False
        self._pause_s = min(2 * self._pause_s or FIRST_S, LONGEST_S)
        self._until = now + self._pause_s
        return True

    def served(self) -> None:
        """Something came by it."""
        self._pause_s, self._until = 0.0, -math.inf

    def holds(self, now: float) -> bool:
        """Whether it is left alone."""
        return now < self._until

    def left(self, now: float) -> float:
        """Seconds for which it is left alone yet."""
        return max(0.0, self._until - now)

    @property
    def tried(self) -> bool:
        """Whether nothing has come by it since it failed: the first that is read by it tells."""
        return self._pause_s > 0.0

    @property
    def pause_s(self) -> float:
        """How long the last one is."""
        return self._pause_s
