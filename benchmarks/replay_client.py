"""The callers of ``replay``, and the sums over what they were told."""

from __future__ import annotations

import http.client
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from benchmarks.programs import ProgramFailed
from benchmarks.record import percentile
from benchmarks.replay_trace import Arrival

LIMIT_S: Final = 300.0
"""Served is what has wholly come by then."""
IN_TIME_S: Final = 5.0
"""Served in time is what is served, and whose first token came by then: a quarter of a trace."""
_LEAD_S: Final = 0.2


@dataclass(frozen=True)
class Heard:
    """An answer: when its first token came, by ``time.perf_counter``, and all of its text. ``cold``: it waited for an
    instance's start, where the system tells."""

    first: float
    text: str
    cold: bool = False


Call = Callable[[Arrival], Heard]
"""One call over HTTP, to its end. Raises ``ProgramFailed``, ``OSError`` or ``HTTPException``."""


@dataclass(frozen=True)
class Told:
    """What came of one arrival. ``startup_ms``: from when the call was due to its first token, whoever was late; of a
    call that was not served, or wrongly, the whole limit."""

    arrival: Arrival
    startup_ms: float
    text: str = ""
    cold: bool = False
    error: str = ""
    wrong: bool = False
    """Its answer is another one than that of an idle platform."""

    @property
    def served(self) -> bool:
        return not self.error

    @property
    def in_time(self) -> bool:
        return self.served and self.startup_ms <= IN_TIME_S * 1e3


@dataclass(frozen=True)
class Sums:
    """Over all calls of a system. Times in ms."""

    calls: int
    served: float
    """Share of the calls that were served."""
    in_time: float
    """Share of those that were served in time."""
    p50: float
    p99: float
    longest: float
    mean: float


def play(arrivals: Sequence[Arrival], call: Call, abandon: Callable[[], None]) -> list[Told]:
    """Each arrival at its time, whatever became of those before it. ``abandon`` breaks off all calls: it is called when
    this is interrupted."""
    with ThreadPoolExecutor(len(arrivals)) as callers:
        try:
            begin = time.perf_counter() + _LEAD_S
            asked = []
            for arrival in arrivals:
                due = begin + arrival.at
                time.sleep(max(0.0, due - time.perf_counter()))
                asked.append(callers.submit(_one, call, arrival, due))
            return [each.result() for each in asked]
        except BaseException:
            abandon()
            raise


def _one(call: Call, arrival: Arrival, due: float) -> Told:
    try:
        heard = call(arrival)
    except (ProgramFailed, OSError, http.client.HTTPException) as error:
        return Told(arrival, LIMIT_S * 1e3, error=f"{type(error).__name__}: {error}"[:300])
    took = time.perf_counter() - due
    if took > LIMIT_S:
        return Told(arrival, LIMIT_S * 1e3, cold=heard.cold, error=f"it took {took:.0f} s")
    return Told(arrival, (heard.first - due) * 1e3, heard.text, heard.cold)


def checked(told: Sequence[Told], right: Mapping[int, str]) -> list[Told]:
    """With those marked whose answer is wrong: all answers of one length are the same text, that in ``right``."""
    return [_checked(each, right) for each in told]


def _checked(told: Told, right: Mapping[int, str]) -> Told:
    if not told.served:
        return told
    expected = right[told.arrival.tokens]
    if told.text and told.text == expected:
        return told
    what = f"{told.arrival.tokens} tokens of function {told.arrival.function}"
    error = f"{what} are {told.text[-60:]!r} at their end, not {expected[-60:]!r}"
    return replace(told, startup_ms=LIMIT_S * 1e3, error=error, wrong=True)


def sums(told: Sequence[Told]) -> Sums:
    """Raises ``ValueError`` if nothing was called."""
    times = [each.startup_ms for each in told]
    return Sums(
        calls=len(told),
        served=sum(each.served for each in told) / len(told) if told else 0.0,
        in_time=sum(each.in_time for each in told) / len(told) if told else 0.0,
        p50=percentile(times, 50),
        p99=percentile(times, 99),
        longest=max(times),
        mean=statistics.fmean(times),
    )
