"""Writes what came for all calls in one loop tick, in one go: waking a task for each costs more than the writing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from sllm_gateway.call import Call
from sllm_runtime.protocol.errors import InternalError, SllmError

log = logging.getLogger(__name__)


class Arrivals:
    """Calls whose new frames are not written yet; ``fail`` ends one whose answer cannot be."""

    def __init__(self, fail: Callable[[Call, SllmError], None], clock: Callable[[], float]) -> None:
        self._fail = fail
        self._clock = clock
        self._calls: list[Call] = []

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
