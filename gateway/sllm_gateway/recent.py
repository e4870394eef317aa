"""What is told of calls: those that are open here, and the last ones that have ended."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec

from sllm_gateway import timing
from sllm_gateway.call import Call
from sllm_gateway.calls import Calls
from sllm_gateway.outputs import progress_words
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.calls import CallsTold, CallTold, ExplainCall, ListCalls, place_of
from sllm_runtime.protocol.clipping import MESSAGE_BYTES, NAME_BYTES, clip
from sllm_runtime.protocol.ctl import Reply
from sllm_runtime.protocol.errors import DeadlineExceeded, SllmError, Unavailable
from sllm_runtime.protocol.frames import End
from sllm_runtime.protocol.limits import BATCH_BYTES
from sllm_runtime.protocol.timeline import Span, comment, sane

log = logging.getLogger(__name__)

MOST: Final = 1000
"""Calls that have ended and are known still."""
MOST_SPANS: Final = 32
"""Of each, of its end."""
ASK_S: Final = 1.0
"""A gateway that knows the call answers within this."""


class Recent:
    """``start`` before use: other gateways ask this one."""

    def __init__(self, bus: Bus, gateway: str, calls: Calls, clock: Callable[[], float]) -> None:
        self._bus, self.gateway, self._calls, self._clock = bus, gateway, calls, clock
        self._ended: dict[str, Call] = {}
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Listen. Raises ``Unavailable``."""
        self._subscriptions.append(await self._bus.listen(subjects.EXPLAIN_CALL, self._asked))
        self._subscriptions.append(
            await self._bus.serve(subjects.open_calls(self.gateway), ListCalls, self._asked_for_all)
        )

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        self._subscriptions.clear()

    def ended(self, call: Call) -> None:
        """``call`` is over. One that another gateway goes on with is known there."""
        if self._calls.left(call):
            return
        while len(self._ended) >= MOST:
            del self._ended[next(iter(self._ended))]
        order = replace(call.order, body=b"")
        kept = Call(order, call.marks, state=call.state, attempts=call.attempts)  # not what it was told, nor its answer
        kept.over = True
        if call.end is not None:
            kept.end = End(usage=call.end.usage, spans=_some(call.end.spans))
        if call.error is not None:
            kept.error = SllmError(clip(call.error.message, MESSAGE_BYTES))
        self._ended[call.id] = kept

    # --- one call -----------------------------------------------------------------------------------
    def here(self, call: str) -> CallTold | None:
        """What this gateway knows of the call of that id."""
        found = self._calls.get(call) or self._ended.get(call)
        if found is not None and self._calls.left(found):
            return None
        return self._told(found) if found is not None else None

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

    def _told(self, call: Call) -> CallTold:
        waits = self._calls.waits(call)
        usage = call.end.usage if call.end is not None else None
        return CallTold(
            call=call.id,
            function=call.version.function,
            version=call.version.number,
            state=call.state,
            instance=call.binding.instance if call.binding is not None else call.marks.instance,
            started=call.marks.started.instance if call.marks.started is not None else "",
            timeline=comment(timing.spans(call, self._clock())),
            error=call.error.message if call.error is not None else "",
            waits=progress_words(waits) if waits is not None else "",
            progress=waits,
            created=call.order.created,
            gateway=self.gateway,
            tokens=usage.completion if usage is not None else call.resumption.count if call.resumption else 0,
        )

    # --- all that are open ----------------------------------------------------------------------------
    def open(self, asked: ListCalls) -> list[CallTold]:
        """Those of this gateway, the newest first."""
        found = []
        for call in self._calls.open():
            place = place_of(call.order.created, call.id)  # as of a kept call, and one that was taken up
            if asked.function in ("", call.version.function) and asked.state in ("", call.state.value):
                found.append((place, call))
        found = [each for each in found if not asked.after or each[0] < asked.after]
        found.sort(key=lambda each: each[0], reverse=True)
        return [msgspec.structs.replace(self._told(call), timeline="") for _, call in found[: asked.limit]]

    async def everywhere(self, asked: ListCalls, others: Iterable[str]) -> tuple[list[CallTold], list[str]]:
        """Those of this gateway and of ``others``, in no order, and which of these do not answer."""
        names = sorted(set(others) - {self.gateway})
        answers = await asyncio.gather(*(self._ask(name, asked) for name in names))
        silent = [name for name, told in zip(names, answers, strict=True) if told is None]
        return [*self.open(asked), *(each for told in answers for each in told or ())], silent

    async def _ask(self, gateway: str, asked: ListCalls) -> list[CallTold] | None:
        found: list[CallTold] = []
        try:
            while asked.limit:
                answer = await self._bus.call(subjects.open_calls(gateway), asked, CallsTold, timeout_s=ASK_S)
                found += answer.calls
                if not answer.calls:
                    break
                last = answer.calls[-1]
                left = max(0, asked.limit - len(answer.calls))
                asked = msgspec.structs.replace(asked, limit=left, after=place_of(last.created, last.call))
        except SllmError as error:
            log.info("gateway %s does not say which calls it has: %s", gateway, error.message)
            return None
        return found

    async def _asked_for_all(self, asked: ListCalls) -> CallsTold:
        told: list[CallTold] = []
        size = 0
        for each in self.open(asked):
            size += len(codec.pack(each))
            if told and size > BATCH_BYTES:
                break
            told.append(each)
        return CallsTold(calls=tuple(told))


def _some(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The first of them: they are a worker's, and kept long after it."""
    return tuple(Span(clip(span.name, NAME_BYTES), span.at, span.ms) for span in sane(spans)[:MOST_SPANS])
