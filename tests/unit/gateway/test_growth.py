"""How the work of a gateway grows with the calls that wait, the starts that they wait for and the instances: what is
the same for many is done once. Work is counted, not timed."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sllm_gateway import starts as starts_module
from sllm_gateway.binding import Binding
from sllm_gateway.call import Call, Marks, Order
from sllm_gateway.dispatch import Dispatcher
from sllm_gateway.moves import Moves
from sllm_gateway.news import News
from sllm_gateway.open_calls import OpenCalls
from sllm_gateway.queue import SlotQueue
from sllm_gateway.resumption import Resumption
from sllm_gateway.starts import PROGRESS_EVERY_S, Starts
from sllm_gateway.table import Version
from sllm_gateway.timers import TICK_S, Timers
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus, Progress
from sllm_runtime.protocol.records import Route, RouteEntry
from sllm_runtime.protocol.states import CallState, InstanceState
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.gateway.peer import entry, manifest

MANY = 200
NODES = 20


class Clock:
    now = 1.0

    def __call__(self) -> float:
        return self.now


def version(name: str = "f", *entries: RouteEntry, **fields: Any) -> Version:
    described = manifest(name, queue_timeout=GIVE_UP_S, **fields)
    return Version(Route(function=name, version=1, manifest=described, entries=entries))


def call_of(known: Version, number: int) -> Call:
    order = Order(f"call-{known.function}-{number}", known, "fn", True, b"", 0, 1.0)
    return Call(order, Marks(known.route, sent=1.0), due=1.0)


def report(node: int, done: int) -> NodeStatus:
    """Of a node that starts three instances of ``f``."""
    starting = tuple(
        InstanceStatus(
            instance=f"n{node}-{number}",
            function="f",
            version=1,
            state=InstanceState.STARTING,
            progress=Progress(stage="weights", done=done, total=1000),
        )
        for number in range(3)
    )
    name = f"n{node}"
    return NodeStatus(
        node=name, boot="b", sequence=1, term=1, cpu=1, memory=1, free_cpu=1, free_memory=1, instances=starting
    )


class Readers:
    """Counts who is woken."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.woken: Counter[str] = Counter()
        monkeypatch.setattr(Call, "wake", lambda call: self.woken.update([call.id]))


def waiting(known: Version, dispatcher: Any, starts: Starts, clock: Clock) -> Timers:
    """The ticker of MANY calls that wait."""
    calls = OpenCalls()
    for number in range(MANY):
        calls.add(call_of(known, number))
    link: Any = SimpleNamespace(connected=True, send_all=lambda *_: None)
    moves: Any = SimpleNamespace(tick=lambda _: None)
    life: Any = SimpleNamespace(fail=_not_expected)
    return Timers(calls, link, dispatcher, moves, starts, cast(Any, SimpleNamespace(slow_consumer=30.0)), clock, life)


def _not_expected(call: Call, error: SllmError) -> None:
    raise AssertionError(f"{call.id}: {error}")


def test_how_far_a_start_is_costs_those_who_ask_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All starts are gone through where a report changes them, not where a call asks."""
    ranked: list[Progress] = []
    rank = starts_module._rank

    def counted(progress: Progress) -> tuple[int, float]:
        ranked.append(progress)
        return rank(progress)

    monkeypatch.setattr(starts_module, "_rank", counted)
    starts = Starts()
    for node in range(NODES):
        starts.on_status(report(node, done=node), 1.0)
    ranked.clear()
    for _ in range(MANY):
        assert starts.of(("f", 1), 2.0) == Progress(stage="weights", done=NODES - 1, total=1000)
    assert not ranked
    starts.on_status(report(0, done=0), 2.0)
    assert len(ranked) < NODES, "a report that changes nothing of its node is not compared with the others"


def test_progress_is_asked_for_once_a_version_and_told_where_it_is_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, starts, readers = Clock(), Starts(), Readers(monkeypatch)
    asked: list[Any] = []
    of = starts.of

    def counted(key: tuple[str, int], now: float) -> Progress | None:
        asked.append(key)
        return of(key, now)

    monkeypatch.setattr(starts, "of", counted)
    never: Any = SimpleNamespace(pending=_not_expected)
    timers = waiting(version(), never, starts, clock)

    def tick(seconds: float) -> Counter[str]:
        readers.woken.clear()
        asked.clear()
        clock.now += seconds
        timers.tick(clock.now, seconds)
        assert asked == [("f", 1)]
        return readers.woken

    assert not tick(TICK_S), "nothing is known of any"
    for node in range(NODES):
        starts.on_status(report(node, done=node), clock.now)
    assert set(tick(TICK_S).values()) == {1}
    assert len(readers.woken) == MANY
    starts.on_status(report(3, done=5), clock.now)
    assert not tick(PROGRESS_EVERY_S), "another start is further"
    for done in (100, 200):
        starts.on_status(report(3, done=done), clock.now)
    assert set(tick(TICK_S).values()) == {1}
    starts.on_status(report(3, done=300), clock.now)
    assert not tick(PROGRESS_EVERY_S / 2), "they were told just now"
    assert set(tick(PROGRESS_EVERY_S).values()) == {1}, "and are told what came meanwhile"
    assert {call.state for call in timers._calls.values()} == {CallState.STARTING}


def test_calls_that_wait_are_not_looked_at_before_anything_of_them_can_be_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why they wait is for those alone whose time is over."""
    clock, looked = Clock(), list[str]()
    why: Any = SimpleNamespace(pending=_not_expected)
    timers = waiting(version(timeout=10 * GIVE_UP_S), why, Starts(), clock)
    look = timers._look_at_deadlines

    def counted(call: Call, now: float) -> None:
        looked.append(call.id)
        look(call, now)

    monkeypatch.setattr(timers, "_look_at_deadlines", counted)
    for _ in range(100):
        clock.now += TICK_S
        timers.tick(clock.now, TICK_S)
    assert Counter(looked).most_common(1) == [("call-f-0", 1)]
    assert len(looked) == MANY


class Told:
    """What is told of calls."""

    def __init__(self) -> None:
        self.told: list[tuple[Kind, str, int]] = []

    def __call__(self, kind: Kind, call: Call, why: str, others: Sequence[Call] = ()) -> None:
        self.told.append((kind, call.id, len(others)))


class Silent:
    """A controller that leads and does not answer."""

    async def ask(self, *_: Any, **__: Any) -> Any:
        await asyncio.Event().wait()


def dispatcher_of(told: Told, to_go: Any = lambda _: ()) -> Dispatcher:
    leader = cast(Any, Silent())
    return Dispatcher(leader, "g", Clock(), place=lambda *_: None, fail=_not_expected, to_go=to_go, tell=told)


async def test_instances_are_counted_where_they_change_and_not_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []
    living = SlotQueue._living

    def counted(queue: SlotQueue[Call], each: RouteEntry) -> bool:
        looked.append(each.instance)
        return living(queue, each)

    monkeypatch.setattr(SlotQueue, "_living", counted)
    full = [entry(f"i{number}", concurrency=1) for number in range(50)]
    known, told = version("f", *full, concurrency=1, max_instances=len(full)), Told()
    dispatcher = dispatcher_of(told)
    try:
        for number in range(len(full) + MANY):
            dispatcher.submit(call_of(known, number))
        for _ in range(MANY):
            assert dispatcher.pending(known.key)
            assert dispatcher.waits(known.key)
        assert looked == [each.instance for each in full], "when the route came"
        assert len(told.told) == MANY
    finally:
        await dispatcher.close()


async def test_who_is_sent_back_is_tried_again_when_the_shortest_hold_ends() -> None:
    """Also where a longer one is waited for already."""
    known = version("f", *(entry(name, concurrency=1) for name in ("i1", "i2")), concurrency=1)
    dispatcher = dispatcher_of(Told())
    try:
        first, second = call_of(known, 0), call_of(known, 1)
        for call, instance in ((first, "i1"), (second, "i2")):
            dispatcher.submit(call)
            dispatcher.accepted(call, instance)
        dispatcher.refused(first, "i1", gone=True)
        dispatcher.submit_again(first)
        line = dispatcher._lines[known.key]
        assert line.timer is not None
        before = line.timer.when()
        dispatcher.refused(second, "i2", gone=False)
        dispatcher.withdraw(first)
        dispatcher.submit_again(second)
        assert line.timer.when() < before
    finally:
        await dispatcher.close()


async def test_who_was_sent_back_has_the_next_slot() -> None:
    """It had its turn: those who came while its instance was asked are behind it."""
    known, placed = version("f", entry("i1", concurrency=1), concurrency=1), list[str]()
    dispatcher = Dispatcher(
        cast(Any, Silent()), "g", Clock(), place=lambda call, *_: placed.append(call.id), fail=_not_expected,
        to_go=lambda _: (), tell=Told(),
    )  # fmt: skip
    try:
        calls = [call_of(known, number) for number in range(3)]
        for call in calls:
            dispatcher.submit(call)
        dispatcher.refused(calls[0], "i1", gone=False)
        dispatcher.submit_again(calls[0])
        dispatcher.on_room(known.key, "i1", 0)
        assert placed == ["call-f-0", "call-f-0"]
    finally:
        await dispatcher.close()


async def test_the_controller_is_asked_again_each_time_that_twice_as_many_wait() -> None:
    """Of a burst of calls it hears in a few questions: each wants so many instances at once."""
    asked: list[int] = []

    class Counting(Silent):
        async def ask(self, verb: str, request: Any, *_: Any, **__: Any) -> Any:
            asked.append(request.waiting)
            await super().ask()

    known = version("f", max_instances=MANY)
    dispatcher = Dispatcher(
        cast(Any, Counting()), "g", Clock(), place=lambda *_: None, fail=_not_expected, to_go=lambda _: (), tell=Told()
    )
    try:
        for number in range(MANY):
            dispatcher.submit(call_of(known, number))
            await asyncio.sleep(0)
        assert asked == [1, 2, 4, 8, 16, 32, 64, 128]
    finally:
        await dispatcher.close()


async def test_what_many_hear_at_once_is_told_at_once() -> None:
    known, told = version(), Told()
    dispatcher = dispatcher_of(told)
    try:
        for number in range(MANY):
            dispatcher.submit(call_of(known, number))
        assert not told.told, "why is not known"
        line = dispatcher._lines[known.key]
        dispatcher._say(line, "no node has room", None)
        dispatcher._say(line, "no node has room for it", None)
        assert told.told == [(Kind.CALL_QUEUED, "call-f-0", MANY - 1)]
    finally:
        await dispatcher.close()


def test_what_many_hear_at_once_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whichever of their events the announcer drops."""
    known = version()
    calls = [call_of(known, number) for number in range(MANY)]
    published: list[str] = []
    bus: Any = SimpleNamespace(identity="g", publish_now=lambda subject, event: published.append(event.call))
    news = News(bus, Clock(), Clock())
    with caplog.at_level(logging.INFO):
        news.tell(Kind.CALL_QUEUED, calls[0], "no node has room", calls[1:])
    (line,) = caplog.records
    assert line.getMessage() == f"call.queued: no node has room (and {MANY - 1} more)"
    assert line.call == "call-f-0"  # type: ignore[attr-defined]
    assert published == [call.id for call in calls[: len(published)]]
    assert 1 < len(published) < MANY
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        news.tell(Kind.CALL_QUEUED, calls[0], "no node has room", calls[1:])
    assert caplog.records[-1].getMessage().endswith(calls[-1].id), "all are named"


def going() -> Version:
    """``i1`` is to go to ``i2``."""
    leaves = entry("i1", concurrency=1, fingerprint="f", moves_to="i2")
    return version("f", leaves, entry("i2", concurrency=1, fingerprint="f"), concurrency=1)


async def test_slots_are_kept_for_calls_that_move_where_there_are_any_to_be_had() -> None:
    counted = 0

    def to_go(_: tuple[str, int]) -> Iterator[str]:
        nonlocal counted
        counted += 1
        yield "i1"

    known = going()
    dispatcher = dispatcher_of(Told(), to_go)
    try:
        first = call_of(known, 0)
        dispatcher.submit(first)
        assert first in dispatcher._lines[known.key].slots.waiting, "the only slot is for who moves"
        assert counted == 1
        dispatcher.take(first, "i2")
        for number in range(1, MANY):
            dispatcher.submit(call_of(known, number))
        assert counted == 1, "its destination has none"
    finally:
        await dispatcher.close()


def test_those_that_leave_are_looked_for_among_their_versions_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, known = OpenCalls(), going()
    one = call_of(known, 0)
    one.resumption = Resumption()
    one.binding = Binding(one.id, 1, known.route.entries[0], b"", 1, 1.0)
    calls.add(one)
    for number in range(MANY):
        calls.add(call_of(version("other"), number))
    none: Any = SimpleNamespace()
    moves = Moves(calls, none, none, none, 1, Clock(), none, deliver=none, fail=none, tell=none)
    moves.on_version(known)
    considered: list[Call] = []
    monkeypatch.setattr(moves, "_consider", lambda found, *_: considered.extend(found))
    monkeypatch.setattr(OpenCalls, "values", lambda _: _not_expected(one, SllmError("all are gone through")))
    moves.tick(2.0)
    assert considered == [one]
    assert list(moves.to_go(known.key)) == ["i1"]
    assert list(calls.of(known.key)) == [one]
    assert calls.discard(one)
    assert not calls.discard(one)
    assert not calls.of(known.key)
