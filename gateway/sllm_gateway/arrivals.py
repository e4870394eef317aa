"""Writes what came for all calls in one loop tick, in one go: waking a task for each costs more than the writing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sllm_gateway.call import Call
from sllm_runtime.protocol.errors import InternalError, SllmError

log = logging.getLogger(__name__)

SOONEST_S: Final = 0.001
"""A timer for less is not worth it."""


class Arrivals:
    """Calls whose new frames are not written yet; ``fail`` ends one whose answer cannot be. Those of which something is
    kept in reserve are looked at again when it is due."""

    def __init__(self, fail: Callable[[Call, SllmError], None], clock: Callable[[], float]) -> None:
        self._fail = fail
        self._clock = clock
        self._calls: list[Call] = []
        self._later: dict[Call, asyncio.TimerHandle] = {}

    def add(self, call: Call) -> None:
        """``call`` has new frames: at the end of this tick they are written, or its reader is woken."""
        if not self._calls:
            asyncio.get_running_loop().call_soon(self._write)
        self._calls.append(call)

    def _write(self) -> None:
        calls, self._calls = self._calls, []
        now = self._clock()
        for call in calls:
            try:
                if call.write_now is None or not call.write_now(now):
                    call.wake()
            except Exception as error:
                log.exception("writing an answer failed", extra={"call": call.id})
                self._fail(call, InternalError(f"the gateway failed ({type(error).__name__}) writing the answer"))
            if call.pace is not None or call in self._later:
                self._look_again(call, now)

    def written(self, call: Call) -> None:
        """Its reader has written by itself: of what it has kept in reserve it will hear when that is due."""
        if call.pace is not None:
            self._look_again(call, self._clock())

    def _look_again(self, call: Call, now: float) -> None:
        """One timer for each call that has a reserve; it is over at the latest when that is to be written. A reader
        that writes, and may wait for its client, looks at it itself afterwards."""
        if timer := self._later.pop(call, None):
            timer.cancel()
        if call.pace is not None and call.held and call.writing is None and not call.over:
            wait = max(SOONEST_S, call.pace.due - now)
            self._later[call] = asyncio.get_running_loop().call_later(wait, self.add, call)
