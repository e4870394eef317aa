"""Where the time of a call went, as its gateway puts it together."""

from __future__ import annotations

from typing import Any, cast

import pytest

from sllm_gateway.call import Call, Marks, Order
from sllm_gateway.timing import spans
from sllm_runtime.protocol.frames import End
from sllm_runtime.protocol.records import Route, RouteEntry
from sllm_runtime.protocol.timeline import Span

START = (Span("sandbox", 0.0, 5.0), Span("import", 5.0, 10.0), Span("setup", 15.0, 5.0))


def call(*late: Span, started: bool) -> Call:
    """Accepted at 100 s, sent 40 ms later to an instance that was ready then, ended."""
    order = Order("c", cast(Any, None), "fn", True, b"", 0, 100.0)
    marks = Marks(route=cast(Route, None), sent=100.04, first=100.09, last=100.1)
    if started:
        marks.started, marks.ready = cast(RouteEntry, Entry()), 100.04
    return Call(order, marks, end=End(spans=(*late, Span("first_token", 0.0, 9.0))))


class Entry:
    spans = START


def test_weights_that_came_after_ready_stand_where_they_belong() -> None:
    found = spans(call(Span("weights", -35.0, 60.0), started=True))
    assert [span.name for span in found] == ["queue", "sandbox", "import", "weights", "setup", "first_token", "tokens"]
    assert (found[3].at, found[3].ms) == pytest.approx((5.0, 60.0))
    assert found[5].ms == pytest.approx(50.0), "ours, not the worker's"


def test_weights_that_began_before_the_call_count_from_its_acceptance() -> None:
    found = spans(call(Span("weights", -50.0, 60.0), started=True))
    assert (found[3].at, found[3].ms) == pytest.approx((0.0, 50.0))


def test_weights_that_others_waited_for_are_not_this_calls() -> None:
    assert [span.name for span in spans(call(Span("weights", -90.0, 60.0), started=False))] == [
        "queue", "first_token", "tokens"
    ]  # fmt: skip
    assert "weights" in [span.name for span in spans(call(Span("weights", -90.0, 95.0), started=False))]
