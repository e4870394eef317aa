"""What becomes of a call by what is heard of its instance: what comes late, or of what is over, changes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from sllm_gateway.binding import Binding
from sllm_gateway.call import Call
from sllm_gateway.handover import Handover
from sllm_gateway.timing import spans
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import DeadlineExceeded, ProtocolError, SllmError
from sllm_runtime.protocol.frames import Open, Opened
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.states import CallState
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import entry
from tests.unit.gateway.test_succession import a_call


class World:
    """One call that an instance is asked to take; ``answer``: of its node."""

    def __init__(self, answer: Opened | SllmError, *, meanwhile: str = "") -> None:
        self.answer, self.meanwhile = answer, meanwhile
        self.did = list[str]()
        self.call: Call = a_call(1)
        self.call.binding = self.binding = Binding(self.call.id, 1, entry(), b"{}", MIB, 0.0)
        dispatcher = SimpleNamespace(
            **{name: self.notes(name) for name in ("accepted", "refused", "release", "submit_again")}
        )
        ending = SimpleNamespace(**{name: self.notes(name) for name in ("lost", "fail", "forget_if_over")})
        link = SimpleNamespace(open=self.open, send_all=self.notes("body"))
        self.handover = Handover(
            *cast(tuple[Any, Any, Any], (link, dispatcher, ending)),
            MIB,
            lambda: 0.0,
            Tasks("calls"),
            self.notes("tell"),
            self.notes("place"),
        )

    def notes(self, what: str) -> Any:
        def note(*_: Any, **how: Any) -> None:
            self.did.append(what + "".join(f" {name}" for name, given in how.items() if given))

        return note

    async def open(self, node: str, request: Open, before: Any) -> Opened:
        if self.meanwhile == "frames":
            self.handover.accepted(self.call, self.binding)
        elif self.meanwhile == "ended":
            self.call.go(CallState.CANCELLED)
        if isinstance(self.answer, SllmError):
            raise self.answer
        return self.answer


GONE, BUSY, TAKEN = Opened(status="gone"), Opened(status="busy"), Opened(status="accepted")


@pytest.mark.parametrize("answer", [DeadlineExceeded("no answer"), ProtocolError("unreadable"), GONE, BUSY])
async def test_no_answer_takes_a_call_from_an_instance_that_has_sent_of_it(answer: Opened | SllmError) -> None:
    """It would run twice."""
    w = World(answer, meanwhile="frames")
    await w.handover._open(w.call, w.binding)
    assert w.did == ["accepted"]
    assert (w.call.binding, w.call.attempts) == (w.binding, 1)


async def test_that_an_instance_has_a_call_counts_once() -> None:
    w = World(TAKEN, meanwhile="frames")
    await w.handover._open(w.call, w.binding)
    assert w.did == ["accepted", "body"]
    assert w.call.attempts == 1


@pytest.mark.parametrize(("answer", "did"), [(GONE, "refused gone"), (BUSY, "refused")])
async def test_what_an_instance_refuses_waits_again(answer: Opened, did: str) -> None:
    w = World(answer)
    await w.handover._open(w.call, w.binding)
    assert w.did == [did, "submit_again"]
    assert (w.call.binding, w.call.attempts) == (None, 0)


@pytest.mark.parametrize(
    ("answer", "did"),
    [(TAKEN, ["accepted"]), (GONE, ["refused gone", "forget_if_over"]), (BUSY, ["refused", "forget_if_over"])],
)
async def test_one_that_has_ended_as_its_instance_was_asked_neither_runs_nor_waits(
    answer: Opened, did: list[str]
) -> None:
    w = World(answer, meanwhile="ended")
    await w.handover._open(w.call, w.binding)
    assert w.did == did


async def test_an_instance_that_may_not_go_on_with_a_call_has_its_slot_back() -> None:
    w = World(TAKEN)
    w.call.numerics = "g"
    assert w.call.resumption is not None
    w.call.resumption.delivered = 1
    assert w.call.bound_to_numerics
    w.handover.place(w.call, entry(fingerprint="f"), 0.0, 0.0)
    assert w.did == ["release", "fail"]


async def test_which_instance_is_asked_is_told_before_it_is() -> None:
    """It is in the log of this gateway by then."""
    w = World(TAKEN)
    w.handover.place(w.call, entry(), 0.0, 0.0)
    assert w.did == ["place"]
    await until(lambda: "body" in w.did, what="it is asked")
    assert w.did[:2] == ["place", "accepted"]


async def test_who_waits_for_a_node_that_says_nothing_is_not_in_the_queue_though_another_had_refused_it() -> None:
    w = World(BUSY)
    await w.handover._open(w.call, w.binding)
    w.handover._clock = lambda: 5.0
    w.answer = DeadlineExceeded("no answer")
    w.handover.place(w.call, entry(), 0.0, 1.0)
    await until(lambda: "lost" in w.did, what="it is lost")
    w.call.marks.failed = 5.0
    waited = {span.name: span.ms for span in spans(w.call)}
    assert waited["first_token"] == 4000.0
