"""How quick the source and the destination of a call on its way are, by when they tell what. No I/O.

Seconds, by the clock of who hears them: messages are in all of it.
"""

from __future__ import annotations

from math import ceil
from typing import Final

from sllm_gateway.pace import lasts

OF_LATE: Final = 0.25
"""Share of the last gap in ``interval``."""
QUICK: Final = 2.0
"""A destination that would be there within so many of its source's intervals, or as many as a reserve lasts, is fed a
last time when that has stopped. Where messages are slower it draws beside its source instead, until it is ahead."""
MESSAGES_S: Final = 0.004
"""The pause of one that is fed a last time beside what a round takes: that its source is to stop, and has."""
STOP_S: Final = 0.05
"""So long a source has at least to end its step; twice its longest silence otherwise."""
QUIET_S: Final = 1.0
"""Who has told nothing for so long is not waited for."""
SLOWER: Final = 1.25
"""Intervals that a source takes for one while it is overtaken; once more so for each PATIENCE tokens without that."""
PATIENCE: Final = 8
OVERTAKES: Final = 32
"""Tokens that a source draws at most until it is overtaken; then it stops."""


class Tempo:
    """The token intervals of both sides of one move that began at ``now``."""

    def __init__(self, now: float) -> None:
        self.interval = 0.0
        """From one whole output of the source to the next, of late; 0: not known yet."""
        self.round = 0.0
        """What the destination took for the last round; 0: none yet."""
        self._silence = 0.0
        """The longest in which the source has told nothing."""
        self._told_at = self._output_at = now
        self._gives_out = False
        """Whether the source has given out one: before, nobody knows since when it was made."""
        self._fed_at: float | None = None
        """Since when the destination computes a round."""

    def source(self, whole: int, now: float) -> None:
        """The source has told something, ``whole`` outputs among it."""
        self._silence, self._told_at = max(self._silence, now - self._told_at), now
        if not whole:
            return
        if self._gives_out:
            gap = (now - self._output_at) / whole
            self.interval += (gap - self.interval) * (OF_LATE if self.interval else 1.0)
        self._gives_out, self._output_at = True, now

    def fed(self, now: float) -> None:
        """A round begins."""
        self._fed_at = now

    def computed(self, now: float) -> None:
        """The destination has all that it was fed."""
        if self._fed_at is not None:
            self.round, self._fed_at = now - self._fed_at, None

    @property
    def messages_slow(self) -> bool:
        """Whether handing over would take more than QUICK intervals of the source, and than a reserve lasts."""
        hidden = max(QUICK, lasts(self.interval))
        return 0.0 < hidden * self.interval < self.round + MESSAGES_S

    @property
    def drawn_meanwhile(self) -> int:
        """Tokens that the source draws while the destination computes a round; 0: not known."""
        return ceil(self.round / self.interval) if self.interval else 0

    @property
    def stop_s(self) -> float:
        """How long a source that is to stop is waited for."""
        return min(QUIET_S, max(STOP_S, 2 * self._silence))

    def quiet(self, now: float) -> bool:
        """Whether no output of the source is waited for."""
        return now - self._output_at >= QUIET_S


class Slowing:
    """A source that draws ever slower than its ``interval``, from ``now`` on, until it is overtaken."""

    def __init__(self, interval: float, now: float) -> None:
        self._interval = interval
        self._since = now
        self._drawn = 0
        self._said = 0

    def drew(self, whole: int) -> None:
        """It has given out so many outputs."""
        self._drawn += whole

    def say(self) -> float:
        """Seconds that it is to take for a token from now on; 0: as it was told."""
        if self._drawn < PATIENCE * self._said:
            return 0.0
        self._said += 1
        return self._interval * SLOWER**self._said

    def hopeless(self, now: float) -> bool:
        """Whether it is not overtaken so."""
        return self._drawn >= OVERTAKES or now - self._since >= QUIET_S
