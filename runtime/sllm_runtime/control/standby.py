"""Standing by while another controller leads, and being elected when it no longer says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from sllm_runtime.platform.clock import since_boot
from sllm_runtime.platform.state import StateStore
from sllm_runtime.platform.telemetry import Once
from sllm_runtime.protocol.errors import StaleTerm, Unavailable
from sllm_runtime.protocol.records import Lease, Term
from sllm_runtime.protocol.subjects import LEASE_KEY, TERM_KEY

log = logging.getLogger(__name__)

POLL_S: Final = 0.1
SILENT_S: Final = 2.0
"""A leader that has not renewed its lease for so long is replaced. Above ``lease.SURE_S``."""
MOST_S: Final = 3 * POLL_S
"""What one look counts at most: when this process itself did not run, or its store was away, nothing is known."""


class Silence:
    """How long nothing has changed, as far as it was looked at. No I/O."""

    def __init__(self) -> None:
        self._seen: tuple[Term | None, Lease | None] | None = None
        self._looked = 0.0
        self._silent = 0.0

    def look(self, term: Term | None, lease: Lease | None, now: float) -> float:
        """What stands there at ``now``; seconds for which it has stood there unchanged."""
        if (term, lease) == self._seen:
            self._silent += min(now - self._looked, MOST_S)
        else:
            self._seen, self._silent = (term, lease), 0.0
        self._looked = now
        return self._silent

    def blind(self) -> None:
        """It could not be looked at: the silence may be the store's."""
        self._seen = None


def vacant(term: Term | None, lease: Lease | None, silent_s: float, controller: str) -> bool:
    """Whether ``controller`` should be elected now: nobody ever led, the leader has ended in order, was an earlier life
    of ``controller`` itself (names are unique), or has been silent for SILENT_S."""
    if term is None or term.controller == controller:
        return True
    released = lease is not None and lease.term == term.term and lease.released
    return released or silent_s >= SILENT_S


async def stand_by(
    store: StateStore,
    controller: str,
    waiting: Callable[[], None],
    *,
    clock: Callable[[], float] = since_boot,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    least: Callable[[], int] = lambda: 1,
) -> int:
    """Wait until nobody leads, then be elected; the new term. Ends only so, or cancelled. Calls ``waiting`` each time
    that it has seen another one lead."""
    silence, unseen = Silence(), Once(log)
    while True:
        try:
            term = await store.get(TERM_KEY, Term, direct=False)
            lease = await store.get(LEASE_KEY, Lease, direct=False)
            if vacant(term, lease, silence.look(term, lease, clock()), controller):
                return await store.elect(controller, over=term.term if term is not None else 0, least=least())
            waiting()
            unseen.over()
        except StaleTerm as error:
            log.info("%s", error.message)
            silence.blind()
        except Unavailable as error:
            unseen.say(logging.INFO, f"cannot see who leads: {error.message}")
            silence.blind()
        await pause(POLL_S)
