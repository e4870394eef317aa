"""A reserve of outputs for a stream whose call moves, so that its caller does not see the pause. No I/O.

Before a call is on its way, and while it is, each output is written somewhat later than the one before it allows, until
a few wait; when none comes for a while, because the call goes over, those are written instead. When it has gone over,
and what follows from that is past too (an instance that ends, one that draws for the first time), they are given back,
a little quicker than they come. Times are seconds of the gateway's monotonic clock.
"""

from __future__ import annotations

from math import inf
from typing import Final

from sllm_gateway.resumption import VALUES
from sllm_runtime.protocol.frames import Frame

STRETCH: Final = (1.3, 1.5, 1.8)
"""Usual intervals from one output to the next while the reserve is made, and while it is used: when it is full, when
one is missing, and when two are. The fewer are left the longer each must last; none is to be as long as two intervals,
which is seen as a pause."""
MOST: Final = len(STRETCH)
"""Outputs that wait at most."""
LATE_S: Final = 0.05
"""So late they may be by it, or one output, ..."""
SLOW_S: Final = 0.25
"""... where that takes no longer."""
STAYS: Final = 16.0
"""For so many usual intervals the reserve stays when the call has gone over."""
EXPECTED_S: Final = 1.0
"""A move that is expected begins within that time, or the reserve is given back."""
QUICKEN: Final = 0.6
"""Usual intervals from one output to the next while it is given back, ..."""
GIVES_BACK: Final = 2.0
"""... and in so many at least one fewer may wait, however quick the others come."""
KNOWN: Final = 4
"""Of so many their interval is known."""
EARLY_S: Final = 0.0005
"""Timers may be so much too early."""


def waits(interval: float) -> int:
    """Outputs that come so far apart (0: it is not known how far) and may wait."""
    return max(1, min(MOST, int(LATE_S / interval))) if 0.0 < interval <= SLOW_S else 0


def lasts(interval: float) -> float:
    """Intervals for which a full reserve of such outputs hides that none comes."""
    return sum(STRETCH[: waits(interval)])


class Pace:
    """When the outputs of one stream are written, since its call is expected to move."""

    def __init__(self, usual: float, now: float) -> None:
        """``usual``: from one output to the next in the call until now; 0: not known."""
        self._usual = usual
        self.expected_at = now
        """Since when the move has been expected."""
        self._expects = False
        """Whether the move has yet to begin: what comes then comes as it usually does."""
        self._ends = False
        self._given_back_from = inf
        self._inside = False
        """Whether of a value only parts are written."""
        self._written = 0
        self._written_at = now
        self._came = 0
        self._first_at = self._last_at = now
        self._first = 1
        """By number, of the outputs whose interval is looked at: that which came at ``_first_at``."""
        self.due = now
        """When to look again, if something waits."""

    def expect(self, now: float) -> None:
        """The call will soon be on its way: the reserve is made before its source is slowed by that."""
        self._expects, self._ends, self.expected_at = True, False, now
        self._given_back_from = now + EXPECTED_S
        self._count_anew()

    def go_on(self) -> None:
        """The call is on its way, or is again."""
        if self._expects:
            self._usual, self._expects = self.interval, False
            self._count_anew()
        self._ends, self._given_back_from = False, inf

    def end(self) -> None:
        """It is on its way no longer: what waits is given back in a while. Repeatable."""
        self._ends = True

    @property
    def interval(self) -> float:
        """From one output to the next, of late; 0: not known. What slows the source while its call moves does not
        count."""
        count = self._came - self._first
        seen = (self._last_at - self._first_at) / count if count >= KNOWN else 0.0
        if not seen or not self._usual:
            return seen or self._usual
        return seen if self._expects else min(seen, self._usual)

    def most(self, now: float) -> int:
        """Outputs that may wait."""
        most = waits(self.interval)
        if most and self._gives_back(now):
            most -= int((now - self._given_back_from) / (GIVES_BACK * self.interval))
        return max(0, most)

    def full(self, now: float) -> bool:
        """Whether as many outputs wait as may."""
        return self._came - self._written >= self.most(now)

    def stays(self, now: float) -> bool:
        """Whether there is a reserve, or one is being made, and nothing is given back."""
        return not self._ends and not self._gives_back(now)

    def release(self, waiting: list[Frame], now: float) -> list[Frame]:
        """Takes out of ``waiting``, in order, what is to be written now."""
        if self._ends and self._given_back_from == inf:
            self._given_back_from = now + STAYS * self.interval
        ends = [at for at, frame in enumerate(waiting, 1) if frame.kind in VALUES and not frame.more]
        self._arrived(self._written + len(ends), now)
        count = self._count(len(ends), now)
        if _parts(waiting, False):  # of a large value, which are passed on as they come
            count = len(ends)
        elif self._inside and ends:
            count = max(count, 1)
        self._written += count
        if count:
            self._written_at = now
        self.due = self._written_at + self._step(len(ends) - count, now)
        upto = len(waiting) if count == len(ends) else ends[count - 1] if count else 0
        released = waiting[:upto]
        del waiting[:upto]
        self._inside = _parts(released, self._inside)
        return released

    def over(self, waiting: list[Frame], now: float) -> bool:
        """Whether there is no need of it any more."""
        return not waiting and self._gives_back(now)

    def _count_anew(self) -> None:
        self._first, self._first_at = max(1, self._came), self._last_at

    def _gives_back(self, now: float) -> bool:
        return now >= self._given_back_from

    def _step(self, waiting: int, now: float) -> float:
        """Seconds from the last output to the next, when so many wait."""
        missing = max(0, self.most(now) - max(1, waiting))
        stretch = STRETCH[min(missing, MOST - 1)]
        return self.interval * (QUICKEN if self._gives_back(now) else stretch)

    def _arrived(self, came: int, now: float) -> None:
        if came > self._came:
            self._first_at = self._first_at if self._came else now
            self._came, self._last_at = came, now

    def _count(self, outputs: int, now: float) -> int:
        due = now >= self._written_at + self._step(outputs, now) - EARLY_S
        return max(outputs - self.most(now), min(outputs, 1) if due else 0)


def _parts(frames: list[Frame], before: bool) -> bool:
    """Whether ``frames`` end inside a value, where ``before`` them it was so: others may come between its parts."""
    return next((frame.more for frame in reversed(frames) if frame.kind in VALUES), before)
