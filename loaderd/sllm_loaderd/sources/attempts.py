"""What an answer that is not the bytes means, and whether and when to ask again. Pure decisions."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from sllm_runtime.protocol.errors import Conflict, Forbidden, ModelNotFound, SllmError, Unavailable
from sllm_runtime.protocol.limits import KIB

AGAIN: Final = frozenset({408, 425, 429, *range(500, 600)})
"""Statuses after which the same request may succeed."""
MOVED: Final = frozenset({301, 302, 303, 307, 308})
GAIN: Final = 64 * KIB
"""An attempt that brought as much was no failure: the count begins anew."""


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """Patience with a server. ``stall_s``: longest time in which fewer than ``GAIN`` bytes come."""

    connect_s: float = 10.0
    stall_s: float = 20.0
    attempts: int = 5
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0
    redirects: int = 5


class TryAgain(Exception):
    """An attempt failed in a way that may pass. ``error`` is what it becomes when patience is at its end."""

    def __init__(self, error: SllmError, after_s: float = 0.0) -> None:
        super().__init__(error.message)
        self.error = error
        self.after_s = after_s


class Attempts:
    """Counts failures in a row, says how long to wait before the next attempt: doubling, with jitter, bounded."""

    def __init__(self, limits: RemoteLimits, chance: random.Random) -> None:
        self._limits = limits
        self._chance = chance
        self._failed = 0

    def delay(self, failure: TryAgain, gained: int) -> float:
        """Seconds to wait after ``failure``, which had brought ``gained`` bytes. Raises its error after the last."""
        self._failed = 1 if gained >= GAIN else self._failed + 1
        if self._failed >= self._limits.attempts:
            raise failure.error from failure
        delay = self._limits.first_delay_s * 2.0 ** (self._failed - 1) * self._chance.uniform(0.5, 1.0)
        return min(max(delay, failure.after_s), self._limits.longest_delay_s)


def refusal(status: int, what: str, detail: str, remedy: str) -> SllmError:
    """The typed error for an answer's ``status``; ``what`` names object and offset, ``remedy`` what to check."""
    said = f" ({detail})" if detail else ""
    if status in (401, 403):
        return Forbidden(f"{what} is refused with {status}{said}; {remedy}", field="model")
    if status in (404, 410):
        return ModelNotFound(
            f"{what} is not there ({status}){said}; register the model from where it is", field="model"
        )
    if status in (412, 416):
        return changed(what, f"the server answered {status}{said}")
    if status in AGAIN:
        return Unavailable(f"{what}: the server answered {status}{said} again and again; try later")
    return Unavailable(f"{what}: the server answered {status}{said}; check the address of the model")


def changed(what: str, why: str) -> Conflict:
    """The object is not the one that was registered."""
    return Conflict(f"{what} has changed since it was registered: {why}; register the model again", field="model")


def retry_after(text: str) -> float:
    """Seconds that a ``Retry-After`` header asks for; 0 for none, or for a date."""
    return float(text) if text.isascii() and text.isdigit() else 0.0
