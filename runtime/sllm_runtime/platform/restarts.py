"""When a child that ended is started again, and when it is given up. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Restarts:
    """When a child that ended is started again: after ``first_s`` seconds, twice as long each time up to ``longest_s``;
    never more than ``most`` times within ``within_s`` seconds."""

    first_s: float = 0.1
    longest_s: float = 5.0
    most: int = 10
    within_s: float = 60.0

    def delay(self, recent: int) -> float | None:
        """Seconds to wait after the ``recent``-th end within the window; ``None``: give up."""
        if recent > self.most:
            return None
        return float(min(self.longest_s, self.first_s * 2 ** max(0, recent - 1)))
