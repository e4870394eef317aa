"""Where the time of a call went, as its gateway puts it together."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_gateway.call import Call, Marks, Order
from sllm_gateway.timing import spans
from sllm_runtime.protocol.frames import End
from sllm_runtime.protocol.records import Route, RouteEntry
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.timeline import Span

START = (Span("sandbox", 0.0, 5.0), Span("import", 5.0, 10.0), Span("setup", 15.0, 5.0))


def call(*late: Span, started: bool, ready: float = 40.0, sent: float = 40.0) -> Call:
    """Accepted at 100 s, sent ``sent`` ms later to an instance that was there ``ready`` ms after acceptance, ended."""
    order = Order("c", cast(Any, None), "fn", True, b"", 0, 100.0)
    at = 100.0 + sent / 1e3
    marks = Marks(route=cast(Route, None), sent=at, first=at + 0.05, last=at + 0.06)
    if started:
        marks.started, marks.ready = cast(RouteEntry, Entry()), 100.0 + ready / 1e3
    return Call(order, marks, end=End(spans=(*late, Span("first_token", 0.0, 9.0))))


def shown(made: Call) -> list[tuple[str, float, float]]:
    return [(span.name, round(span.at, 3), round(span.ms, 3)) for span in spans(made)][:-2]


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


def test_of_a_start_that_others_waited_for_before_only_what_was_left_is_this_calls() -> None:
    """It came 12 ms after that start was placed, 8 ms before the instance was there."""
    assert shown(call(started=True, ready=8.0, sent=8.0)) == [
        ("queue", 0.0, 0.0), ("import", 0.0, 3.0), ("setup", 3.0, 5.0)
    ]  # fmt: skip


def test_a_call_that_waits_for_a_slot_after_the_start_queues_behind_its_stages() -> None:
    """The instance was there at 30 ms and took others first."""
    assert shown(call(started=True, ready=30.0, sent=75.0)) == [
        ("queue", 0.0, 10.0), ("sandbox", 10.0, 5.0), ("import", 15.0, 10.0), ("setup", 25.0, 5.0),
        ("queue", 30.0, 45.0),
    ]  # fmt: skip


def test_late_weights_stand_among_the_stages_also_where_the_call_queued_behind_them() -> None:
    found = spans(call(Span("weights", -50.0, 30.0), started=True, ready=30.0, sent=75.0))
    assert [span.name for span in found] == [
        "queue", "sandbox", "import", "weights", "setup", "queue", "first_token", "tokens"
    ]  # fmt: skip
    assert "weights" not in [span.name for span in spans(call(Span("weights", -50.0, 30.0), started=True, sent=10.0))]


@pytest.mark.parametrize("failed", [None, 103.0])
def test_what_a_call_without_an_answer_has_waited_for_lasts_until_now_or_until_it_failed(failed: float | None) -> None:
    """In the queue, also if an instance was asked and refused it; then at its instance, which may die with no word."""
    made = Call(Order("c", cast(Any, None), "fn", True, b"", 0, 100.0), Marks(route=cast(Route, None), sent=100.0))
    made.marks.failed, now = failed, 103.0 if failed is None else 160.0
    assert spans(made, now) == (Span("queue", 0.0, 3000.0),)
    made.marks.sent = 100.5
    assert spans(made, now) == (Span("queue", 0.0, 3000.0),)
    made.attempts = 1
    assert spans(made, now) == (Span("queue", 0.0, 500.0), Span("first_token", 500.0, 2500.0))
    made.end = End()
    assert spans(made, now) == (Span("queue", 0.0, 500.0), Span("first_token", 500.0, 2500.0))


@given(st.floats(0, 100), st.floats(0, 100))
def test_the_parts_of_a_call_add_up_to_it(ready: float, behind: float) -> None:
    """Whenever it came: they follow each other from its acceptance to its last token, each beginning where the one
    before has ended (these stages do not overlap)."""
    made = call(started=True, ready=ready, sent=ready + behind)
    found = spans(made)
    assert found[0].at == 0.0
    for span, after in itertools.pairwise(found):
        assert span.ms >= 0.0
        assert after.at == pytest.approx(span.at + span.ms, abs=1e-6)
    assert made.marks.last is not None
    assert sum(span.ms for span in found) == pytest.approx((made.marks.last - 100.0) * 1e3, abs=1e-6)


def test_a_call_that_begins_again_waits_in_the_queue() -> None:
    """``retries=1``: its instance died after half a second, and nobody has room for it since."""
    made = Call(Order("c", cast(Any, None), "fn", True, b"", 0, 100.0), Marks(route=cast(Route, None), sent=100.0))
    made.attempts = 1
    made.go(CallState.RUNNING)
    made.begin_again(100.5)
    for failed in (None, 160.0):
        made.marks.failed = failed
        assert spans(made, 160.0)[-1] == Span("queue", 500.0, 59500.0)
    assert sum(span.ms for span in spans(made, 160.0)) == 60000.0
