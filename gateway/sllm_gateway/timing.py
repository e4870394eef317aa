"""A call's timeline: its own times, and those of the instance's start if it waited for that. By one clock, ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from sllm_gateway.call import Call
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.timeline import (
    CONVERT,
    FIRST_TOKEN,
    IMPORT,
    MOVE,
    QUEUE,
    SANDBOX,
    TOKENS,
    WEIGHTS,
    Span,
    shift,
)

_BESIDE: Final = frozenset({SANDBOX, CONVERT, IMPORT})
"""Stages of a start that stand before its weights."""


def spans(call: Call, now: float | None = None) -> tuple[Span, ...]:
    """What is known now, in ms from acceptance on. Of a call whose answer has not begun, and never will if it has
    failed, what it waits for lasts until ``now``, or until it failed."""
    marks, begin = call.marks, call.order.accepted
    until = None if marks.first is not None or call.state is CallState.SUCCEEDED else (marks.failed or now)
    again = marks.again if until is not None and call.attempts else None
    waits = not call.attempts or (again is not None and again < marks.sent)  # asked anew
    queued = until if until is not None and waits else marks.sent
    sent = (queued - begin) * 1e3
    found = [Span(QUEUE, 0.0, sent)]
    if marks.started is not None and marks.started.spans:
        found = _start(marks.started.spans, (marks.ready - begin) * 1e3, sent)
    if marks.first is not None and marks.last is not None:
        first, last = (marks.first - begin) * 1e3, (marks.last - begin) * 1e3
        found += [Span(FIRST_TOKEN, sent, first - sent), Span(TOKENS, first, last - first)]
        found += [Span(MOVE, (at - begin) * 1e3, 0.0) for at in marks.moves]
    if call.end is not None:
        names = {span.name for span in found}
        more = [span for span in shift(call.end.spans, sent) if span.name not in names]
        coming = [span for span in more if span.name == WEIGHTS and (marks.started or span.at + span.ms > sent)]
        before = next((at for at, span in enumerate(found) if at and span.name not in _BESIDE), len(found))
        found[before:before] = _from_here(coming)
        found += [span for span in more if span.name != WEIGHTS]
    if until is not None and not waits and all(span.name != FIRST_TOKEN for span in found):
        had = (until if again is None else again) - begin
        found.append(Span(FIRST_TOKEN, sent, had * 1e3 - sent))
        if again is not None:
            found.append(Span(QUEUE, had * 1e3, (until - again) * 1e3))
    return tuple(found)


def _start(stages: tuple[Span, ...], ready: float, sent: float) -> list[Span]:
    """A start whose last stage ended when the instance was there, ``ready``, between the times before and after it in
    which the call queued: until it was placed, and then for a slot, if others had come before."""
    placed = ready - max(span.at + span.ms for span in stages)
    behind = [Span(QUEUE, ready, sent - ready)] if sent > ready else []
    return [Span(QUEUE, 0.0, max(0.0, placed)), *_from_here(shift(stages, placed)), *behind]


def _from_here(stages: Iterable[Span]) -> list[Span]:
    """What of them was after this call's acceptance: others may have waited for that start before."""
    return [
        Span(span.name, max(0.0, span.at), min(span.ms, span.at + span.ms))
        for span in stages
        if span.at >= 0.0 or span.at + span.ms > 0.0
    ]
