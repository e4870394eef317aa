"""A call's timeline: its own times, and those of the instance's start if it waited for that. By one clock, ours."""

from __future__ import annotations

from sllm_gateway.call import Call
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
        found += [Span(MOVE, (at - begin) * 1e3, 0.0) for at in marks.moves]
    if call.end is not None:
        names = {span.name for span in found}
        more = [span for span in shift(call.end.spans, sent) if span.name not in names]
        coming = [span for span in more if span.name == WEIGHTS and (marks.started or span.at + span.ms > sent)]
        before = sum(span.name in (QUEUE, SANDBOX, CONVERT, IMPORT) for span in found)
        found[before:before] = map(_from_here, coming)
        found += [span for span in more if span.name != WEIGHTS]
    return tuple(found)


def _from_here(span: Span) -> Span:
    """Weights that went on coming when the instance was ready: what of it was after this call's acceptance."""
    end = max(0.0, span.at + span.ms)
    return Span(span.name, max(0.0, span.at), min(span.ms, end))
