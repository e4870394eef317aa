"""A call's timeline: its own times, and those of the instance's start if it waited for that. By one clock, ours."""

from __future__ import annotations

from sllm_gateway.call import Call
from sllm_runtime.protocol.timeline import FIRST_TOKEN, QUEUE, TOKENS, Span, shift


def spans(call: Call) -> tuple[Span, ...]:
    """What is known now, in ms from acceptance on. The start's spans are placed so that they end when it was ready."""
    marks, begin = call.marks, call.order.accepted
    sent = (marks.sent - begin) * 1e3
    found: list[Span] = []
    if marks.started is not None and marks.started.spans:
        took = max(span.at + span.ms for span in marks.started.spans)
        placed = max(0.0, (marks.ready - begin) * 1e3 - took)
        found += [Span(QUEUE, 0.0, placed), *shift(marks.started.spans, placed)]
    else:
        found.append(Span(QUEUE, 0.0, sent))
    if marks.first is not None and marks.last is not None:
        first, last = (marks.first - begin) * 1e3, (marks.last - begin) * 1e3
        found += [Span(FIRST_TOKEN, sent, first - sent), Span(TOKENS, first, last - first)]
    if call.end is not None:
        names = {span.name for span in found}
        found += [span for span in shift(call.end.spans, sent) if span.name not in names]
    return tuple(found)
