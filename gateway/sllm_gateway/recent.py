"""What is told of calls: those that are open here, and the last ones that have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import msgspec

from sllm_gateway import timing
from sllm_gateway.call import Call
from sllm_gateway.outputs import progress_words
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.calls import CallTold, ExplainCall
from sllm_runtime.protocol.ctl import Reply
from sllm_runtime.protocol.errors import DeadlineExceeded, Unavailable
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.timeline import comment

MOST: Final = 1000
"""Calls that have ended and are known still."""
ASK_S: Final = 1.0
"""A gateway that knows the call answers within this."""


def told(call: Call, waits: Progress | None) -> CallTold:
    """What is known of a call now; ``waits``: what it waits for."""
    return CallTold(
        call=call.id,
        function=call.version.function,
        version=call.version.number,
        state=call.state,
        instance=call.binding.instance if call.binding is not None else call.marks.instance,
        started=call.marks.started.instance if call.marks.started is not None else "",
        timeline=comment(timing.spans(call)),
        error=call.error.message if call.error is not None else "",
        waits=progress_words(waits) if waits is not None else "",
    )


class Recent:
    """``start`` before use: other gateways ask this one."""

    def __init__(self, bus: Bus, find: Callable[[str], Call | None], waits: Callable[[Call], Progress | None]) -> None:
        """``find`` finds a call that is open here, ``waits`` says what it waits for."""
        self._bus, self._find, self._waits = bus, find, waits
        self._ended: dict[str, Call] = {}
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Listen. Raises ``Unavailable``."""
        self._subscription = await self._bus.listen(subjects.EXPLAIN_CALL, self._asked)

    async def close(self) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    def ended(self, call: Call) -> None:
        """``call`` is over."""
        while len(self._ended) >= MOST:
            del self._ended[next(iter(self._ended))]
        kept = Call(replace(call.order, body=b""), call.marks, state=call.state)  # not what it was told, nor its answer
        kept.end, kept.error = call.end, call.error
        self._ended[call.id] = kept

    def here(self, call: str) -> CallTold | None:
        """What this gateway knows of the call of that id."""
        found = self._find(call) or self._ended.get(call)
        return told(found, self._waits(found)) if found is not None else None

    async def anywhere(self, call: str) -> CallTold | None:
        """What any gateway knows of it, asked for ASK_S at most. Raises ``Unavailable`` without a connection."""
        known = self.here(call)
        if known is not None:
            return known
        try:
            return await self._bus.call(subjects.EXPLAIN_CALL, ExplainCall(call=call), CallTold, timeout_s=ASK_S)
        except DeadlineExceeded:
            return None
        except Unavailable:
            if self._bus.connected:  # nobody listens but this one
                return None
            raise

    def _asked(self, _subject: str, reply_to: str, data: bytes) -> None:
        known = self.here(codec.unpack(ExplainCall, data).call)
        if known is not None and reply_to:
            self._bus.publish_now(reply_to, Reply(value=msgspec.Raw(codec.pack(known))))
