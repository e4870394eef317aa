"""What a gateway that dies has left: logged, claimed by exactly one, gone on with; real NATS, a scripted node."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Final, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from nats.errors import NoRespondersError
from nats.js.errors import NotFoundError

from sllm.cli import top
from sllm_gateway.backlog import Backlog
from sllm_gateway.binding import Binding
from sllm_gateway.call import Call, Earlier, Marks, Order
from sllm_gateway.detached import EPOCHS, Detached
from sllm_gateway.hearsay import Hearsay
from sllm_gateway.journal import Journal
from sllm_gateway.ledger import Ledger, streams
from sllm_gateway.link import Link
from sllm_gateway.lives import STILL_S, Lives, Lost, Over
from sllm_gateway.open_calls import OpenCalls
from sllm_gateway.resumption import Resumption
from sllm_gateway.roll import MOST, Roll
from sllm_gateway.routes import calls
from sllm_gateway.stored import Stored
from sllm_gateway.succession import _ID_FRAME, Succession, id_frames
from sllm_gateway.table import Version
from sllm_gateway.taking_up import TakingUp
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.calls import Batch, Began, BodyPart, CallOrder, CancelAsked, Journaled
from sllm_runtime.protocol.errors import CallMoved, CallNotFound, Cancelled, Draining, InstanceLost, Unavailable
from sllm_runtime.protocol.frames import Frame, FrameKind, Ids, Open, Opened, Usage
from sllm_runtime.protocol.limits import ID_END, MAX_MESSAGE, MIB, MOST_IDS
from sllm_runtime.protocol.lives import (
    BEAT_S,
    LIVES_AGE_S,
    MOST_LOGGED,
    OVERDUE_BEATS,
    SILENT_BEATS,
    TAG,
    WHOLE_S,
    Gone,
    Life,
    Log,
    More,
    Whole,
)
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.records import Route
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import BODIES_STREAM, JOURNAL_STREAM, LIVES_STREAM, call_entries, life_beat
from tests.fixtures.nats import CONTROLLER, GATEWAY, GATEWAY_2, Nats
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.heir import REACHED
from tests.unit.gateway.peer import Run, entry, manifest, second, world
from tests.unit.gateway.test_faults import SSE
from tests.unit.gateway.test_resumption import engine


def asked(call: str, life: str = "", gateway: str = GATEWAY, function: str = "tokens", **fields: object) -> CallOrder:
    given_ = dict(function=function, version=1, kind="fn", seed=7, parts=1, durable=False, created=5.0)
    return CallOrder(call=call, gateway=gateway, life=life, **{**given_, **fields})  # type: ignore[arg-type]


DRAWN: Final = 1000


# --- the log --------------------------------------------------------------------------------------
def a_call(number: int, body: bytes = b"{}") -> Call:
    route = entry_route()
    order = Order(f"call-{number}", Version(route), "fn", True, body, 7, 0.0)
    return Call(order, Marks(route, sent=0.0), resumption=Resumption())


def entry_route() -> Route:
    return Route(function="tokens", version=1, manifest=manifest("tokens"), active=True, entries=())


@dataclass
class Gateway:
    """Calls that go on, and what is written of them."""

    ledger: Ledger = field(default_factory=Ledger)
    calls: dict[int, Call] = field(default_factory=dict)
    logs: list[Log] = field(default_factory=list)
    now: float = 0.0

    def do(self, what: str, number: int, count: int) -> None:
        call = self.calls.get(number)
        if what == "begin" and call is None:
            self.calls[number] = call = a_call(number)
            self.ledger.begin(call, asked(call.id))
        elif what == "write":
            self.now += count
            self.logs += self.ledger.logs(self.now)
        elif what == "beginnings":
            self.logs += self.ledger.logs(self.now, begun=True)
        elif what == "anew":
            self.ledger.anew()
        elif call is None:
            return
        elif what == "ids":
            assert call.resumption is not None
            generation = number % 2
            known = len(call.resumption.known(generation))
            new = tuple(call.attempts * DRAWN + number for number in range(known, known + count))
            drawn = Frame(0, FrameKind.IDS, codec.pack(Ids(generation, known, new)))
            call.resumption.take([drawn, Frame(0, FrameKind.OUTPUT, str(new).encode())])
        elif what == "moves":
            call.epoch, call.numerics = call.epoch + 1, "f"
        elif what == "again":
            call.resumption, call.attempts = Resumption(), call.attempts + 1
        elif what == "end":
            self.ledger.end(self.calls.pop(number).id)

    def left(self) -> dict[str, tuple[int, str, tuple[tuple[int, ...], ...], int, bytes]]:
        known = ((call, call.resumption) for call in self.calls.values())
        return {
            call.id: (call.epoch, call.numerics, kept.recorded, kept.delivered, kept.digest)
            for call, kept in known
            if kept is not None
        }


def told(found: list[Whole]) -> dict[str, tuple[int, str, tuple[tuple[int, ...], ...], int, bytes]]:
    """The same, as a log says it."""
    return {
        each.order.call: (each.epoch, each.numerics, each.ids, each.order.delivered, each.order.delivered_hash)
        for each in found
    }


STEPS = st.tuples(
    st.sampled_from(["begin", "begin", "ids", "ids", "write", "beginnings", "moves", "again", "end"]),
    st.integers(0, 3),
    st.integers(1, 9),
)


@given(st.lists(STEPS, max_size=60), st.lists(STEPS, max_size=30))
def test_what_is_written_is_what_there_was(
    before: list[tuple[str, int, int]], after: list[tuple[str, int, int]]
) -> None:
    """Also of a log whose beginning has aged."""
    gateway = Gateway()
    for step in before:
        gateway.do(*step)
    gateway.do("write", 0, int(WHOLE_S) + 1)
    aged = max(0, len(gateway.logs) - 1)
    for step in after:
        gateway.do(*step)
    gateway.do("write", 0, 1)
    for logs in (gateway.logs, gateway.logs[aged:]):
        found = streams(codec.unpack(Log, codec.pack(log)) for log in logs)
        assert told(found) == gateway.left()


@given(st.lists(STEPS, max_size=40), st.integers(1, 5))
def test_a_log_with_a_hole_says_nothing_that_is_wrong(steps: list[tuple[str, int, int]], hole: int) -> None:
    """As ids are drawn here, the n-th of an output is n, and DRAWN more each time that it is drawn anew: of each stream
    the first of one drawing are known, without a gap."""
    gateway = Gateway()
    gateway.do("begin", 1, 1)
    for step in [*steps, *[("ids", 1, 2)] * 3]:
        gateway.do(*step)
        gateway.do("write", 0, 1)
    for whole in streams(gateway.logs[:-hole] + gateway.logs[len(gateway.logs) - hole + 1 :]):
        for ids in filter(None, whole.ids):
            drawn = ids[0] - ids[0] % DRAWN
            assert ids == tuple(range(drawn, drawn + len(ids)))


def test_the_class_of_an_answer_is_written_before_its_first_ids() -> None:
    """Its caller may have outputs of it by then."""
    gateway = Gateway()
    gateway.do("begin", 0, 1)
    call = gateway.calls[0]
    call.epoch = 1
    gateway.do("write", 0, 1)
    call.numerics, call.exact = "f", False
    gateway.do("write", 0, 1)
    (whole,) = streams(gateway.logs)
    assert (whole.numerics, whole.exact) == ("f", False)


def test_the_class_of_one_that_waited_is_written_before_its_first_ids() -> None:
    gateway = Gateway()
    gateway.do("begin", 0, 1)
    gateway.do("beginnings", 0, 1)
    call = gateway.calls[0]
    call.epoch, call.binding = 1, Binding(call.id, 1, entry("i1", fingerprint="f"), b"", MIB, 0.0)
    gateway.ledger.placed(call)
    assert gateway.ledger.news.is_set()
    gateway.do("beginnings", 0, 1)
    assert streams(gateway.logs)[0].numerics == "f"


def test_ids_of_two_drawings_are_not_put_together() -> None:
    """The message that said that it was drawn anew, at another class, was lost."""
    whole = Whole(order=asked("call-1"), body=b"", epoch=1, numerics="x", exact=True, ids=((1, 2, 3, 4),))
    more = More(call="call-1", epoch=3, numerics="y", exact=True, ids=(Ids(0, 2, (9, 9)),), drawing=1)
    (found,) = streams([Log((whole,)), Log((more,))])
    assert (found.numerics, any(found.ids)) == ("y", False)


def test_an_instance_that_is_asked_counts_as_if_it_had_it() -> None:
    gateway = Gateway()
    gateway.do("begin", 0, 1)
    call = gateway.calls[0]
    call.binding = Binding(call.id, 1, entry("i1", fingerprint="f"), b"", MIB, 0.0)
    gateway.do("write", 0, 1)
    assert streams(gateway.logs)[0].numerics == "f"
    call.binding = None  # it is full
    gateway.do("write", 0, 1)
    assert streams(gateway.logs)[0].numerics == ""


def test_what_it_had_before_counts_beside_the_instance_that_is_asked() -> None:
    """Its class is that of the ids that are known; one part that is not exact makes all of it so."""
    gateway = Gateway()
    gateway.do("begin", 0, 1)
    call = gateway.calls[0]
    call.numerics = "f"
    call.binding = Binding(call.id, 2, entry("i2", fingerprint="g", exact=False), b"", MIB, 0.0)
    gateway.do("write", 0, 1)
    (whole,) = streams(gateway.logs)
    assert (whole.numerics, whole.exact) == ("f", False)


def test_that_it_is_drawn_anew_is_written() -> None:
    gateway = Gateway()
    for what in ("begin", "write", "ids", "write", "again", "ids", "write", "ids", "write"):
        gateway.do(what, 0, 1)
    entries = [entry for log in gateway.logs for entry in log.entries]
    assert [entry.drawing for entry in entries if not isinstance(entry, Gone)] == [0, 0, 1, 1]


def test_one_whose_caller_has_all_of_it_is_left_to_nobody() -> None:
    gateway = Gateway()
    for number in range(2):
        gateway.do("begin", number, 1)
    gateway.do("write", 0, 1)
    gateway.calls[0].go(CallState.CANCELLED)
    assert [call for call, _ in gateway.ledger.written()] == [gateway.calls[1]]


def test_a_stream_that_is_never_written_leaves_nothing() -> None:
    gateway = Gateway()
    gateway.do("begin", 0, 1)
    gateway.do("end", 0, 1)
    assert gateway.ledger.logs(0.0) == []


def test_a_beginning_and_an_end_are_written_at_once() -> None:
    """Ids wait for the next look: they can be drawn again, and an answer that its caller has need not be."""
    gateway, news = Gateway(), list[bool]()
    for what in ("begin", "write", "ids", "write", "end", "write", "begin", "end"):
        gateway.do(what, 0, 1)
        news.append(gateway.ledger.news.is_set())
    assert news == [True, False, False, False, True, False, True, True], "what began is looked for, though it has gone"


def test_only_what_is_new_is_written() -> None:
    gateway = Gateway()
    for what in ("begin", "write", "write", "ids", "write", "end", "write"):
        gateway.do(what, 0, 2)
    assert [type(entry) for log in gateway.logs for entry in log.entries] == [Whole, More, Gone]
    assert [len(log.entries) for log in gateway.logs] == [1, 1, 1]
    moved = Gateway()
    for what in ("begin", "write", "moves", "write", "write"):
        moved.do(what, 0, 2)
    assert [type(entry) for log in moved.logs for entry in log.entries] == [Whole, More]


def test_a_beginning_is_written_without_a_look_at_the_others() -> None:
    gateway = Gateway()
    steps = [
        ("begin", 0),
        ("beginnings", 0),
        ("ids", 0),
        ("begin", 1),
        ("beginnings", 0),
        ("end", 1),
        ("beginnings", 0),
    ]
    for what, number in steps:
        gateway.do(what, number, 2)
    written = [type(entry) for log in gateway.logs for entry in log.entries]
    assert written == [Whole, Whole, Gone], "the ids of the first wait for the next look"
    gateway.do("write", 0, 1)
    assert [type(entry) for entry in gateway.logs[-1].entries] == [More]
    gateway.do("anew", 0, 1)
    gateway.do("beginnings", 0, 1)
    assert [type(entry) for entry in gateway.logs[-1].entries] == [Whole], (
        "what does not count is to be written at once"
    )


def test_what_cannot_go_on_elsewhere_or_is_large_is_left_out() -> None:
    ledger = Ledger()
    large, lasting = a_call(1, b"x" * (MOST_LOGGED + 1)), a_call(2)
    lasting.resumption = None
    for call in (large, lasting):
        ledger.begin(call, asked(call.id))
    assert len(ledger) == 0


def test_messages_are_not_too_large() -> None:
    ledger = Ledger()
    for number in range(10):
        call = a_call(number, b"x" * MOST_LOGGED)
        ledger.begin(call, asked(call.id))
    logs = ledger.logs(0.0)
    assert all(len(codec.pack(log)) < 512 * 1024 for log in logs)
    assert len(streams(logs)) == 10


def test_messages_are_not_too_large_however_many_streams_end_together() -> None:
    """As where a load balancer goes away: each gateway's heir would have all of these made again."""
    ledger = Ledger()
    calls = [a_call(10**23 + number) for number in range(12_000)]  # ids are of 24 digits
    for call in calls:
        ledger.begin(call, asked(call.id))
    logs = ledger.logs(0.0)
    for call in calls:
        ledger.end(call.id)
    logs += ledger.logs(1.0)
    assert all(len(codec.pack(log)) <= MAX_MESSAGE for log in logs)
    assert streams(logs) == []


@given(st.lists(st.lists(st.integers(0, ID_END - 1), max_size=50), max_size=3))
def test_recorded_ids_are_an_answers_beginning(ids: list[list[int]]) -> None:
    while ids and not ids[-1]:
        ids.pop()
    resumption = Resumption()
    resumption.take(id_frames(tuple(map(tuple, ids))))
    assert resumption.recorded == tuple(map(tuple, ids))
    assert resumption.delivered == 0


def test_many_recorded_ids_are_an_answers_beginning() -> None:
    """More than one frame holds."""
    ids = (tuple(range(2 * _ID_FRAME + 1)), (7,))
    resumption = Resumption()
    resumption.take(id_frames(ids))
    assert resumption.recorded == ids


def test_a_stream_is_written_whole_before_what_was_written_of_it_is_no_longer_kept() -> None:
    gateway, wholes = Gateway(), list[float]()
    gateway.do("begin", 0, 1)
    while gateway.now < 3 * LIVES_AGE_S:
        gateway.do("ids", 0, 1)
        gateway.do("write", 0, 1)
        wholes += [gateway.now for entry in gateway.logs[-1].entries if isinstance(entry, Whole)]
        assert gateway.now - wholes[-1] < LIVES_AGE_S / 2


# --- who is over ----------------------------------------------------------------------------------
ME = Life(life="m" * 12, gateway="g1")
OTHER = Life(life="o" * 12, gateway="g2")


def roll(*lives: Life) -> Roll:
    found = Roll("g1")
    for life in (ME, *lives):
        found.heard(life)
    return found


def silent(found: Roll, *others: Life) -> Roll:
    """So many beats of one's own that whoever is not heard meanwhile is over."""
    for beat in range(SILENT_BEATS):
        found.beat()
        for life in others:
            found.heard(Life(life=life.life, gateway=life.gateway, beat=life.beat + beat + 1))
    return found


def test_who_beats_lives() -> None:
    found = silent(roll(OTHER), OTHER)
    assert found.over(OTHER.life, ME.life) is False
    assert found.abandoned(ME.life) == []
    assert found.over("unknown", ME.life) is None


def test_who_stood_still_for_less_than_it_looks_at_is_not_over() -> None:
    """Its last beat was up to BEAT_S before."""
    found = roll(OTHER)
    for _ in range(math.ceil(STILL_S / BEAT_S) + 1):
        found.beat()
    assert found.over(OTHER.life, ME.life) is False


def test_who_is_silent_is_over_but_oneself() -> None:
    found = silent(roll(OTHER))
    assert found.abandoned(ME.life) == [OTHER]
    assert found.over(ME.life, ME.life) is False


def test_one_that_is_overdue_and_has_left_is_over_until_it_beats() -> None:
    found = roll(OTHER, Life(life="s" * 12, gateway="g3", heir=ME.life, settled=True))
    for _ in range(OVERDUE_BEATS):
        assert found.overdue(ME.life) == set()
        found.beat()
    assert found.overdue(ME.life) == {"g2"}
    found.left("g2")
    assert found.abandoned(ME.life) == [OTHER]
    assert found.overdue(ME.life) == set()
    found.heard(beat_of(OTHER, 1))
    assert found.abandoned(ME.life) == []
    assert found.over(OTHER.life, ME.life) is False


def test_of_a_gateway_that_has_left_a_life_that_was_heard_since_is_not_over() -> None:
    """It has come again, and begun another one."""
    found, new = roll(OTHER), Life(life="n" * 12, gateway=OTHER.gateway)
    for _ in range(OVERDUE_BEATS):
        found.beat()
    found.heard(new)
    found.left(OTHER.gateway)
    assert found.abandoned(ME.life) == [OTHER]
    assert found.over(new.life, ME.life) is False


def test_the_same_record_again_is_no_beat() -> None:
    found = roll(OTHER)
    for _ in range(SILENT_BEATS):
        found.beat()
        found.heard(OTHER)
    assert found.abandoned(ME.life) == [OTHER]


@pytest.mark.parametrize("life", [Life(life="a" * 12, gateway="g1"), Life(life="b" * 12, gateway="g2", over=True)])
def test_an_earlier_life_of_this_gateway_and_one_that_ended_are_over_at_once(life: Life) -> None:
    assert roll(life).abandoned(ME.life) == [life]


def test_an_heir_that_lives_is_left_alone_and_one_that_died_is_not() -> None:
    inherited = Life(life="i" * 12, gateway="g3", heir=OTHER.life)
    found = roll(OTHER, inherited)
    assert found.abandoned(ME.life) == []
    assert silent(found).abandoned(ME.life) == [OTHER, inherited]
    settled = Life(life="s" * 12, gateway="g3", heir=OTHER.life, settled=True)
    assert settled not in silent(roll(OTHER, settled)).abandoned(ME.life)
    mine = Life(life="x" * 12, gateway="g3", heir=ME.life)
    assert roll(mine).abandoned(ME.life) == [mine]


def test_lives_that_are_done_with_are_forgotten() -> None:
    found = roll()
    for number in range(3 * MOST):
        found.heard(Life(life=f"{number:012x}", gateway="g2", heir=ME.life, settled=True))
    assert found.over(f"{0:012x}", ME.life) is None
    assert found.over(f"{3 * MOST - 1:012x}", ME.life)


# --- whether a call comes -------------------------------------------------------------------------
def beat_of(life: Life, beat: int, **fields: object) -> Life:
    return replace(life, beat=beat, **fields)


async def asked_when(
    news: list[Life], call: str = f"call-{OTHER.life[:TAG]}1", kept: Callable[[int], bool] | None = None
) -> int:
    """How much of the ``news`` a gateway waits for before it says that there is no such call. Raises as it does.
    ``kept``: it was told of the call, and whether that is in a journal after so much of them."""
    heard, told, now = roll(beat_of(OTHER, 3)), 0, 0.0

    async def next_news(seconds: float) -> None:
        nonlocal told, now
        now += 1.0
        if told < len(news):
            heard.heard(news[told])
            told += 1

    lives = cast(Lives, SimpleNamespace(me=replace(ME, beat=7)))
    none = cast(Any, None)

    async def find(_: str) -> None:
        if kept is None or not kept(told):
            raise CallNotFound("not yet")

    journal = cast(Journal, SimpleNamespace(find=find))
    hearsay = cast(Hearsay, SimpleNamespace(tells_of=lambda *_: kept is not None))
    succession = Succession(lives, heard, Ledger(), hearsay, journal, none, none, lambda: now, next_news)
    succession._watch = cast(Any, SimpleNamespace(synced=asyncio.Event()))
    succession._watch.synced.set()
    await succession.coming(call)
    return told


async def test_a_gateway_lives_if_it_has_beaten_twice_since_the_question() -> None:
    mine = [beat_of(ME, 7), beat_of(ME, 8)]
    late = [beat_of(OTHER, beat) for beat in (4, 5, 6)]
    since = [beat_of(OTHER, beat) for beat in (7, 8, 9)]
    assert await asked_when([*mine, *since]) == len(mine) + 2
    assert await asked_when([mine[0], *late, mine[1], *since]) == len([*mine, *late]) + 2, "what came late is no proof"


async def test_who_has_ended_in_order_is_taken_over_however_often_it_has_beaten() -> None:
    over = [beat_of(OTHER, 4), beat_of(OTHER, 5, over=True), beat_of(OTHER, 5, heir=ME.life)]
    assert await asked_when([beat_of(ME, 8), *over, beat_of(OTHER, 5, heir=ME.life, settled=True)]) == 5


async def test_who_has_been_taken_over_has_left_what_it_had() -> None:
    left = [beat_of(OTHER, 4, heir=ME.life), beat_of(OTHER, 4, heir=ME.life, settled=True)]
    assert await asked_when([beat_of(ME, 8), *left]) == 3


async def test_what_was_told_of_a_life_that_is_over_is_waited_for() -> None:
    """Its gateway woke, and was killed before it found out: the heir looks for more after its next beat."""
    over = beat_of(OTHER, 4, heir=ME.life, settled=True)
    beats = [beat_of(ME, 8), over, beat_of(ME, 9), beat_of(ME, 10), beat_of(ME, 11)]
    assert await asked_when(beats) == 2
    assert await asked_when(beats, kept=lambda told: told >= 4) == 4
    with pytest.raises(Unavailable, match="ask again"):
        await asked_when(beats, kept=lambda told: False)


async def test_where_nothing_is_known_of_it_in_the_end_it_is_to_be_asked_again() -> None:
    with pytest.raises(Unavailable, match="ask again"):
        await asked_when([beat_of(ME, 8), beat_of(OTHER, 4)])
    assert await asked_when([], call="call-nobody") == 0
    assert await asked_when([], call=f"call-{ME.life[:TAG]}1") == 0


# --- fences ---------------------------------------------------------------------------------------
def repeating(byte: bytes) -> Callable[[int], bytes]:
    """So many random bytes, always these."""
    return lambda count: byte * count


@dataclass
class Two:
    a: Lives
    b: Lives
    journal_a: Journal
    journal_b: Journal


async def two(nats: Nats) -> Two:
    """What two gateways write by; the streams are there."""
    await nats.streams()
    found = []
    for identity, byte in ((GATEWAY, b"a"), (GATEWAY_2, b"b")):
        bus = await nats.bus(identity)
        stored = Stored(bus)
        found.append((Lives(bus, stored, identity, repeating(byte), time.monotonic), Journal(bus, stored)))
    return Two(found[0][0], found[1][0], found[0][1], found[1][1])


async def written(lives: Lives, log: Log) -> None:
    """Told and stored, if it is."""
    lives.tell(log)
    await lives.store()


def a_log(call: str) -> Log:
    return Log((Gone(call),))


async def test_a_life_that_is_declared_over_writes_nothing_more(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    await written(w.a, a_log("call-1"))
    assert await w.b.claim(w.a.me) is not None
    with pytest.raises(Over):
        await written(w.a, a_log("call-2"))
    with pytest.raises(Over):
        await w.a.beat()
    assert await w.b.log_of(w.a.me.life) == {0: a_log("call-1")}


async def test_what_no_message_holds_keeps_nothing_behind_it_from_being_stored(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    w.a.tell(Log((Gone("x" * MAX_MESSAGE),)))
    await written(w.a, a_log("call-1"))
    assert list((await w.b.log_of(w.a.me.life)).values()) == [a_log("call-1")]


async def test_what_the_others_cannot_be_told_is_stored_all_the_same(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More waits to be sent than may."""

    def full(*_: Any) -> None:
        raise Unavailable("no room")

    w = await two(nats)
    await w.a.beat()
    monkeypatch.setattr(Bus, "publish_now", full)
    await written(w.a, a_log("call-1"))
    assert await w.b.log_of(w.a.me.life) == {0: a_log("call-1")}


def test_a_message_holds_the_largest_stream_that_is_logged() -> None:
    """Both as it is logged and as its heir keeps it."""
    ids = ((ID_END - 1,) * MOST_IDS,)
    whole = Whole(order=asked("call-1"), body=b"x" * MOST_LOGGED, epoch=1, numerics="f", exact=True, ids=ids)
    assert len(Backlog().add(Log((whole,)))[1]) <= MAX_MESSAGE
    assert len(codec.pack(Batch(0, id_frames(ids)))) <= MAX_MESSAGE


async def test_jetstream_is_asked_again_while_its_servers_may_elect_a_leader() -> None:
    now, elected = 0.0, ELECTION_S - 1

    async def last(*_: Any, **__: Any) -> Any:
        if now < elected:
            raise NoRespondersError
        raise NotFoundError

    async def pause(seconds: float) -> None:
        nonlocal now
        now += seconds

    bus = cast(Bus, SimpleNamespace(jetstream=SimpleNamespace(get_last_msg=last)))
    stored = Stored(bus, lambda: now, pause)
    assert await stored.last(LIVES_STREAM, life_beat("l")) is None
    now, elected = 0.0, 10 * ELECTION_S
    with pytest.raises(Unavailable, match="call again"):
        await stored.last(LIVES_STREAM, life_beat("l"))
    assert ELECTION_S <= now < ELECTION_S + 1


async def test_a_life_that_beats_is_not_declared_over(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    seen = w.a.me
    await w.a.beat()
    assert await w.b.claim(seen) is None
    await w.a.beat()


async def test_one_of_many_declares_it_over(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    others = [
        w.b,
        *(Lives(w.b._bus, w.b._stored, f"g{n}", repeating(bytes([n])), time.monotonic) for n in range(5)),
    ]
    claims = await asyncio.gather(*(other.claim(w.a.me) for other in others))
    assert len([claim for claim in claims if claim is not None]) == 1
    (claim,) = [claim for claim in claims if claim is not None]
    settled = await w.b.settle(claim)
    assert settled is not None
    assert settled.settled
    assert await w.b.settle(claim) is None


async def test_what_is_not_stored_for_a_beat_of_which_no_word_came_is_stored_then(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    await w.a._stored.write(life_beat(w.a.me.life), w.a.me)
    with pytest.raises(Lost):
        await written(w.a, a_log("call-1"))
    assert await w.b.log_of(w.a.me.life) == {}
    await w.a.store()
    assert await w.b.log_of(w.a.me.life) == {0: a_log("call-1")}


async def test_one_of_many_has_a_life_whose_record_is_gone(nats: Nats) -> None:
    w = await two(nats)
    others = [w.a, *(Lives(w.b._bus, w.b._stored, f"g{n}", repeating(bytes([n])), time.monotonic) for n in range(5))]
    claims = await asyncio.gather(*(other.claim_lost(OTHER) for other in others))
    (claim,) = [claim for claim in claims if claim is not None]
    assert await w.b.find(OTHER.life) == claim


async def test_the_order_of_a_new_call_is_no_other_one(nats: Nats) -> None:
    w = await two(nats)
    first = asked("call-1", "a")
    fence = await w.journal_a.begin(JOURNAL_STREAM, first, 60)
    assert await w.journal_a.begin(JOURNAL_STREAM, first, 60) == fence, "it was written before, and handed on late"
    with pytest.raises(CallMoved):
        await w.journal_b.begin(JOURNAL_STREAM, asked("call-1", "b", GATEWAY_2), 60)


async def test_a_life_whose_record_was_lost_goes_on(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    await (await nats.bus(CONTROLLER)).jetstream.purge_stream(LIVES_STREAM, subject=life_beat(w.a.me.life))
    with pytest.raises(Lost):
        await written(w.a, a_log("call-1"))
    await w.a.beat()
    await written(w.a, a_log("call-1"))


async def test_a_life_that_has_not_beaten_for_so_long_that_its_record_may_have_aged_is_over(nats: Nats) -> None:
    """Another gateway may have declared it over, and that record be gone as well."""
    await nats.streams()
    bus, now = await nats.bus(GATEWAY), 0.0
    lives = Lives(bus, Stored(bus), GATEWAY, repeating(b"a"), lambda: now)
    await lives.beat()
    for passed, error in ((LIVES_AGE_S / 2 - 1, Lost), (LIVES_AGE_S / 2, Over)):
        await (await nats.bus(CONTROLLER)).jetstream.purge_stream(LIVES_STREAM, subject=life_beat(lives.me.life))
        now += passed
        with pytest.raises(error):
            await lives.beat()
        if error is Lost:
            await lives.beat()


async def test_one_takes_a_call_over_and_the_other_writes_no_more_of_it(nats: Nats) -> None:
    w = await two(nats)
    first = asked("call-1", "a")
    fence = await w.journal_a.write(JOURNAL_STREAM, "call-1", first, 60)
    await w.journal_a.write(JOURNAL_STREAM, "call-1", Batch(0, ()), 60, fence, number=0)
    claims = await asyncio.gather(
        *(w.journal_b.take_over(JOURNAL_STREAM, first, asked("call-1", str(n), GATEWAY_2), 60) for n in range(4))
    )
    assert len([claim for claim in claims if claim is not None]) == 1
    with pytest.raises(CallMoved, match="/v1/calls/call-1/events"):
        await w.journal_a.write(JOURNAL_STREAM, "call-1", Batch(0, ()), 60, fence, number=1)
    assert await w.journal_b.take_over(JOURNAL_STREAM, first, first, 60) is None
    (taken,) = [claim for claim in claims if claim is not None]
    mine = (await w.journal_b.find("call-1"))[1]
    for known in (first, mine):  # whoever has not heard of its write asks again
        assert await w.journal_b.take_over(JOURNAL_STREAM, known, mine, 60) == taken
    await w.journal_b.write(JOURNAL_STREAM, "call-1", Batch(0, ()), 60, taken, number=1)
    journaled, _ = await w.journal_a.now(JOURNAL_STREAM, "call-1")
    assert (journaled.batches, journaled.order and journaled.order.gateway) == (2, GATEWAY_2)


async def test_what_is_created_twice_stays_as_it_was(nats: Nats) -> None:
    w = await two(nats)
    for order in (asked("call-1", "a"), asked("call-1", "b")):
        await w.journal_a.create(JOURNAL_STREAM, "call-1", order, 60)
    assert (await w.journal_b.find("call-1"))[1].life == "a"


def succession_of(bus: Bus, lives: Lives, journal: Journal) -> Succession:
    """What a gateway makes of others' streams; it takes up none itself."""
    taking_up, clock = cast(TakingUp, SimpleNamespace(look=lambda _: None)), time.monotonic
    hearsay = Hearsay(bus, GATEWAY_2)
    return Succession(lives, Roll(GATEWAY_2), Ledger(), hearsay, journal, taking_up, lambda *_: None, clock)


async def test_a_body_that_was_given_back_is_not_written_again(nats: Nats) -> None:
    """By a gateway that wakes when its heir has ended the call already: nobody would give it back."""
    w = await two(nats)
    bus = await nats.bus(GATEWAY_2)
    whole = Whole(order=asked("call-1"), body=b"{}", epoch=3, numerics="x", exact=True, ids=())
    heir = succession_of(bus, w.b, w.journal_b)
    await heir._keep(whole)
    await w.journal_b.give_back(whole.order)

    async def gone() -> bool:
        return await Stored(bus).last(BODIES_STREAM, call_entries(BODIES_STREAM, "call-1")) is None

    await until(gone, what="its body is no more")
    await heir._keep(whole)
    assert await gone()


async def test_ids_are_kept_beside_the_class_that_drew_them_alone(nats: Nats) -> None:
    """An heir died that knew of another drawing than the next one does: what that one knows is drawn again."""
    w = await two(nats)
    bus = await nats.bus(GATEWAY_2)
    whole = Whole(order=asked("call-1"), body=b"{}", epoch=3, numerics="y", exact=True, ids=((9, 9),))
    began = Began(at=whole.order.created, numerics="x", epoch=1)
    assert await w.journal_a.create(JOURNAL_STREAM, "call-1", began, 60)
    await succession_of(bus, w.b, w.journal_b)._keep(whole)
    journaled, entries = await w.journal_a.now(JOURNAL_STREAM, "call-1")
    assert journaled.began == began
    assert journaled.order == whole.order
    assert not [each for each in entries if isinstance(each, Batch)]


async def test_what_lies_in_a_hole_of_the_stored_log_is_known_by_who_has_heard_it(nats: Nats) -> None:
    """Its gateway had given up what waited, and could store again before it died."""
    w = await two(nats)
    bus = await nats.bus(GATEWAY_2)
    heir = succession_of(bus, w.b, w.journal_b)
    await heir._hearsay.start()
    await w.a.beat()
    for number in range(3):
        w.a.tell(a_log(f"call-{number}"))
        if number == 1:
            w.a.anew()
        else:
            await w.a.store()
    await until(lambda: heir._hearsay.last(w.a.me.life) == 2, what="all is heard")
    assert set(await w.b.log_of(w.a.me.life)) == {0, 2}
    assert set((await heir._log_of(w.a.me.life, set()))[0]) == {0, 1, 2}
    await heir._hearsay.close()


# --- the whole gateway ----------------------------------------------------------------------------
async def six(run: Run) -> None:
    """Draws what it is not told, and says all of it again."""
    (known, *_) = (*run.head.recorded, ())
    for number in range(6):
        if number >= len(known):
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
        if number >= run.head.delivered:
            run.out(number)
    run.end()


async def left_behind(nats: Nats) -> tuple[Lives, str, str]:
    """A life that ended without a word, of the same name as what comes after it: a stream that goes on, one that had
    ended."""
    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))
    bus = await nats.bus(GATEWAY)
    dead = Lives(bus, Stored(bus), GATEWAY, repeating(b"d"), time.monotonic)
    await dead.beat()
    call, ended = f"call-{dead.me.life[:TAG]}1", f"call-{dead.me.life[:TAG]}2"
    whole = Whole(order=asked(call, dead.me.life), body=b"{}", epoch=3, numerics="f", exact=True, ids=((0, 1),))
    await written(dead, Log((whole, replace(whole, order=asked(ended, dead.me.life)))))
    await written(dead, Log((More(call=call, epoch=4, numerics="f", exact=True, ids=(Ids(0, 2, (2,)),)), Gone(ended))))
    return dead, call, ended


async def gone_on_with(nats: Nats, call: str, ended: str) -> None:
    """By a gateway that begins now; whoever read the stream reads on."""
    async with world(nats, {"tokens": six}) as w:
        answer = await w.http.get(f"/v1/calls/{call}/events", headers={"last-event-id": "1"})
        assert answer.status_code == 200, answer.text
        lines = [line for line in answer.text.splitlines() if line.startswith(("id:", "data:"))]
        assert lines == [f"{part}" for n in range(2, 6) for part in (f"id: {n}", f"data: {n}")] + ["data: [DONE]"]
        (opened,) = w.node.opened
        assert opened.head.recorded == ((0, 1, 2),)
        assert (opened.head.delivered, opened.head.seed, opened.head.created) == (0, 7, 5.0)
        assert opened.head.epoch > 4
        assert (await w.http.get(f"/v1/calls/{ended}/events")).status_code == 404


async def test_what_a_gateway_left_is_gone_on_with_in_its_numerics_class_alone(nats: Nats) -> None:
    """Its caller may have read more than was written: another class would draw other tokens behind that."""
    _, call, _ = await left_behind(nats)
    async with world(nats, {"tokens": six}) as w:
        await w.deploy(engine("tokens"), entry("i2", fingerprint="g"))
        answer = await w.http.get(f"/v1/calls/{call}/events", headers={"last-event-id": "1"})
        assert '"code":"instance_lost"' in answer.text
        assert "computes other bits" in answer.text
        assert not w.node.opened


async def test_tokens_that_another_gateway_drew_do_not_come_at_once_when_it_dies(nats: Nats) -> None:
    """``sllm top`` has its rates of what is counted here, while such a call is open and after its end."""
    _, call, _ = await left_behind(nats)
    opened = asyncio.Event()

    async def waits(run: Run) -> None:
        await opened.wait()
        for number in range(3, 6):
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
        for number in range(6):
            run.out(number)
        run.end(usage=Usage(prompt=1, completion=6))

    async with world(nats, {"tokens": waits}) as w:

        def came() -> float:
            return top.counts(w.gateway.metrics.text().decode()).get("tokens tokens", 0.0)

        await until(lambda: w.node.opened, what="it is gone on with")
        before = came()
        opened.set()
        await w.http.get(f"/v1/calls/{call}/events")
        await until(lambda: w.gateway.calls.get(call) is None)
        assert (before, came()) == (0.0, 3.0)


async def test_what_nobody_reads_on_ends_after_the_window(nats: Nats) -> None:
    """Not before: it goes on without a reader for so long."""
    _, call, _ = await left_behind(nats)
    runs: list[Run] = []

    async def waits(run: Run) -> None:
        runs.append(run)
        await run.cancelled.wait()
        run.end()

    window, began = 1.0, time.monotonic()
    async with world(nats, {"tokens": waits}, resume_window=window) as w:
        await until(lambda: runs, what="it is gone on with")
        await until(runs[0].cancelled.is_set, what="it is ended")
        assert time.monotonic() - began >= window
        await until(lambda: w.gateway.calls.get(call) is None, what="it is over")
        answer = await w.http.get(f"/v1/calls/{call}")
    assert (answer.json()["state"], answer.json()["error"]["code"]) == ("CANCELLED", "cancelled")


async def test_what_a_gateway_left_is_gone_on_with_and_read(nats: Nats) -> None:
    """Its heir was killed as it had just begun."""
    dead, call, ended = await left_behind(nats)
    bus = await nats.bus(GATEWAY)
    killed = Lives(bus, Stored(bus), GATEWAY, repeating(b"k"), time.monotonic)
    await killed.beat()
    assert await killed.claim(dead.me) is not None
    await gone_on_with(nats, call, ended)


@pytest.mark.parametrize("last", ["batch-0", "order"])
async def test_what_an_heir_has_half_taken_over_when_it_is_killed_is_gone_on_with(nats: Nats, last: str) -> None:
    dead, call, ended = await left_behind(nats)
    argv = [sys.executable, "-m", "tests.unit.gateway.heir", dead.me.life, last]
    env = {**os.environ, **nats.env(GATEWAY)}
    child = await asyncio.create_subprocess_exec(*argv, env=env, stdout=asyncio.subprocess.PIPE)
    try:
        assert child.stdout is not None
        async with asyncio.timeout(GIVE_UP_S):
            assert await child.stdout.readline() == REACHED
    finally:
        child.kill()
        await child.wait()
    await gone_on_with(nats, call, ended)


async def test_a_gateway_that_was_taken_for_dead_ends_its_streams_and_begins_a_new_life(nats: Nats) -> None:
    async with world(nats) as w:
        stop = asyncio.Event()

        async def waits(run: Run) -> None:
            run.out(0)
            await run.cancelled.wait()
            stop.set()
            run.end()

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=waits)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call = stream.headers["sllm-call-id"]
            other = await another(nats)
            life = await _life_of(other, call)

            await _logged(other, life, lambda order: order.call == call)
            await _declared_over(other, life)
            text = "".join([part async for part in stream.aiter_text()])
        assert '"code":"call_moved"' in text
        assert text.count("id: ") == 1
        await until(stop.is_set, what="its instance was told")
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            assert await _life_of(other, stream.headers["sllm-call-id"]) != life


@pytest.mark.parametrize("inherited", [False, True])
async def test_a_stream_goes_on_at_a_gateway_that_slept_as_long_as_all_others(nats: Nats, inherited: bool) -> None:
    """A laptop whose lid was closed for some minutes: the record of its gateway's life has aged, and nobody was there
    to take its streams over. Where somebody was, and that record has aged as well, what it made of them says so."""
    async with world(nats) as w:
        wakes = asyncio.Event()

        async def waits(run: Run) -> None:
            run.out(0)
            await wakes.wait()
            for number in range(1, 6):
                run.out(number)
            run.end()

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=waits)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call = stream.headers["sllm-call-id"]
            other, lives = await another(nats), w.gateway._succession._lives
            await _logged(other, lives.me.life, lambda order: order.call == call)
            if inherited:
                (kept,) = [whole for each, whole in w.gateway._ledger.written() if each.id == call]
                await w.gateway._succession._journal.create(JOURNAL_STREAM, call, kept.order, 60.0)
            lives._clock = lambda: time.monotonic() + LIVES_AGE_S
            await (await nats.bus(CONTROLLER)).jetstream.purge_stream(LIVES_STREAM)
            life = lives.me.life
            await until(lambda: lives._recorded.is_set() and lives._sequence, what="it has found out what it is")
            await _beaten(lives)
            wakes.set()
            text = "".join([part async for part in stream.aiter_text()])
        assert ('"code":"call_moved"' in text) == inherited
        assert text.endswith("data: [DONE]\n\n") == (not inherited)
        assert (lives.me.life == life) == (not inherited)


async def _beaten(lives: Lives) -> None:
    """Once it has."""
    beat = lives.me.beat
    await until(lambda: lives.me.beat > beat + 1, what="it beats")


async def test_a_stream_that_its_own_gateway_takes_up_again_has_ended_there_before(nats: Nats) -> None:
    """Its code takes a while to end. Nothing of the first one is left: the only slot of its instance is free again."""
    async with world(nats) as w:
        waiting, ends = asyncio.Event(), asyncio.Event()

        async def late(run: Run) -> None:
            if run.head.recorded or ends.is_set():
                await six(run)
                return
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (0,))))
            run.out(0)
            waiting.set()
            await run.cancelled.wait()
            await ends.wait()
            run.end(Cancelled("stopped"))

        await w.deploy(engine("tokens"), entry(fingerprint="f", concurrency=1), script=late)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call = stream.headers["sllm-call-id"]
            other = await another(nats)
            life = await _life_of(other, call)
            await until(waiting.is_set)
            await _logged(other, life, lambda order: order.call == call)
            await until(lambda: _done_with(other, life), what="it is declared over between two beats")
            text = "".join([part async for part in stream.aiter_text()])
        assert '"code":"call_moved"' in text
        taking_up, first = w.gateway._taking_up, w.gateway.calls.get(call)
        await until(lambda: call in {**taking_up._waiting, **taking_up._claimed}, what="it waits for its own end")
        assert w.gateway.calls.get(call) is first is not None
        ends.set()
        answer = await w.http.get(f"/v1/calls/{call}/events", headers={"last-event-id": "0"})
        assert [line for line in answer.text.splitlines() if line.startswith("data:")] == [
            *(f"data: {number}" for number in range(1, 6)),
            "data: [DONE]",
        ]
        await until(lambda: not len(w.gateway.calls) and not len(w.gateway._ledger), what="nothing of it is left")
        assert (await w.http.post("/fn/tokens", json={})).json() == list(range(6))


async def _done_with(lives: Lives, life: str) -> bool:
    """Whether this one could declare that life over, and has all of it."""
    found = await lives.find(life)
    claimed = await lives.claim(found) if found is not None else None
    return claimed is not None and await lives.settle(claimed) is not None


def test_two_gateways_that_take_a_call_up_one_after_the_other_use_different_epochs() -> None:
    """The first one died before a word of it was in the journal."""
    epochs, order = list[int](), asked("call-1")

    def admit(_: Order, earlier: Earlier) -> Call:
        epochs.append(earlier.epoch)
        raise Draining("this one stops")

    calls, table = SimpleNamespace(admit=admit), SimpleNamespace(get=lambda *_: Version(entry_route()))
    none, journaled = cast(Any, None), Journaled()
    journaled.take_all([order, BodyPart(0, b"{}")])
    detached = Detached(cast(Any, calls), none, cast(Any, table), none, str, 60.0, lambda: 0.0, lambda: 0.0)
    for fence in (5, 6):
        with pytest.raises(Draining):
            detached.go_on(order, journaled, [], fence)
    assert abs(epochs[1] - epochs[0]) >= EPOCHS


def gone_on(journaled: Journaled, frames: list[Frame], function: Manifest) -> Earlier:
    """What becomes of a call of which that is written. Raises why it does not go on."""
    found = list[Earlier]()

    def admit(_: Order, earlier: Earlier) -> Call:
        found.append(earlier)
        raise Draining("seen")

    route = replace(entry_route(), manifest=function)
    calls, table = SimpleNamespace(admit=admit), SimpleNamespace(get=lambda *_: Version(route))
    none, order = cast(Any, None), asked("call-1")
    journaled.take_all([order, BodyPart(0, b"{}")])
    detached = Detached(cast(Any, calls), none, cast(Any, table), none, str, 60.0, lambda: 0.0, lambda: 0.0)
    with pytest.raises(Draining, match="seen"):
        detached.go_on(order, journaled, frames, 5)
    return found[0]


BEGAN: Final = Began(at=0.0, numerics="f", epoch=1)


def test_a_call_that_somebody_wants_ended_does_not_go_on() -> None:
    journaled = Journaled()
    journaled.take_all([CancelAsked()])
    with pytest.raises(Cancelled, match="on request"):
        gone_on(journaled, [], manifest("tokens"))


def test_a_call_of_which_something_is_written_does_not_begin_again() -> None:
    """Whoever has read that would read it a second time."""
    begun, journaled = Journaled(), Journaled()
    begun.take_all([BEGAN])
    again = manifest("tokens", retries=1)
    assert not gone_on(begun, [], again).taken
    frames = journaled.take_all([BEGAN, Batch(0, (Frame(0, FrameKind.OUTPUT, b"0"),))])
    with pytest.raises(InstanceLost, match="not resumable"):
        gone_on(journaled, frames, again)
    assert gone_on(journaled, frames, engine("tokens")).taken, "nor where it is resumed"


def test_a_call_that_ends_takes_no_other_of_its_id_along() -> None:
    calls, first, again = OpenCalls(), a_call(1), a_call(1)
    calls.add(first)
    assert calls.discard(first)
    calls.add(again)
    assert not calls.discard(first)
    assert calls.get(again.id) is again
    assert (calls.some.is_set(), calls.none.is_set()) == (True, False)
    assert calls.discard(again)
    assert (calls.some.is_set(), calls.none.is_set()) == (False, True)


async def test_a_gateway_whose_life_is_over_begins_no_call_before_it_has_another(nats: Nats) -> None:
    w = await two(nats)
    await w.a.beat()
    await w.a.recorded()
    assert await w.b.claim(w.a.me) is not None
    with pytest.raises(Over):
        await w.a.beat()
    assert not w.a._recorded.is_set()


async def test_what_its_heir_does_not_know_is_written_before_its_caller_is_sent_on(nats: Nats) -> None:
    """It was told of only when the life was over and done with: begun just before its gateway stood still."""
    async with world(nats) as w:
        waiting = asyncio.Event()

        async def tokens(run: Run) -> None:
            if not run.head.recorded:
                run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (0,))))
                run.out(0)
                waiting.set()
                await run.cancelled.wait()
                run.end()
            else:
                await six(run)

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=tokens)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call = stream.headers["sllm-call-id"]
            other = await another(nats)
            life = await _life_of(other, call)
            await until(waiting.is_set)
            await until(
                lambda: _done_with(other, life),
                what="it is declared over between two beats, and nothing of it gone on with",
            )
            text = "".join([part async for part in stream.aiter_text()])
        assert '"code":"call_moved"' in text
        answer = await w.http.get(f"/v1/calls/{call}/events", headers={"last-event-id": "0"})
        assert answer.status_code == 200, answer.text
        assert [line for line in answer.text.splitlines() if line.startswith("data:")] == [
            *(f"data: {number}" for number in range(1, 6)),
            "data: [DONE]",
        ]


async def test_what_was_left_is_found_whoever_has_written_it_and_whatever_a_list_lacks(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two gateways may write the same stream, of which they know more and less: the first one counts."""

    async def lacks_all(_: Journal) -> dict[str, Journaled]:
        return {}

    monkeypatch.setattr(Journal, "all", lacks_all)
    async with world(nats, {"tokens": six}) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))
        succession = w.gateway._succession
        first, later = (asked("call-1", "0" * 12, parts=0, delivered=number) for number in (0, 1))
        for order in (first, later):
            await succession._keep(Whole(order=order, body=b"", epoch=0, numerics="", exact=True, ids=()))
        w.gateway._taking_up.look(["call-1", "call-2"])
        answer = await w.http.get("/v1/calls/call-1/events")
        assert "data: [DONE]" in answer.text
        assert '"code"' not in answer.text


async def test_kept_calls_of_a_gateway_whose_record_has_aged_are_gone_on_with(nats: Nats) -> None:
    """JetStream was away for two minutes, and the gateway died meanwhile: nobody can claim its life any more."""
    async with world(nats, {"tokens": six}) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))
        succession = w.gateway._succession
        aged = Life(life="e" * 12, gateway="g3", over=True)
        order = asked("call-1", aged.life, aged.gateway, parts=0)
        await succession._keep(Whole(order=order, body=b"", epoch=0, numerics="", exact=True, ids=()))
        succession._heard(aged)
        async with asyncio.timeout(GIVE_UP_S):
            answer = await w.http.get("/v1/calls/call-1/events")
        assert data_of(answer.text) == [*map(str, range(6)), "[DONE]"]
        assert succession._roll.abandoned(succession._lives.me.life) == [], "it is not looked for again"


async def test_state_and_cancel_wait_for_a_call_of_a_gateway_that_died_just_now(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As who reads it does: its heir has not written it yet."""
    monkeypatch.setattr(calls, "ASK_S", 0.1)
    monkeypatch.setattr(calls, "HEARD_S", 0.1)
    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"))

        async def coming(call: str) -> None:
            order = asked(call, "0" * 12, parts=0)
            whole = Whole(order=order, body=b"", epoch=0, numerics="", exact=True, ids=())
            await w.gateway._succession._keep(whole)

        monkeypatch.setattr(w.gateway._kept, "_coming", coming)
        state = await w.http.get("/v1/calls/call-1")
        assert (state.status_code, state.json()["state"]) == (200, "QUEUED")
        assert (await w.http.post("/v1/calls/call-2/cancel")).status_code == 202
        journal = w.gateway._kept._journal
        assert (await journal.now(JOURNAL_STREAM, "call-2"))[0].cancelled, "whoever goes on with it reads this"


@pytest.mark.parametrize("later", [[0, "other", 2], [0]], ids=["others", "fewer"])
async def test_a_function_that_says_something_else_after_its_gateways_death_is_no_answer(
    nats: Nats, later: list[Any]
) -> None:
    """Who reads on from an output it had would read the end of another text."""
    async with world(nats) as w:
        waiting = asyncio.Event()

        async def moody(run: Run) -> None:
            again = bool(run.head.recorded)
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (0, 1))))
            for value in later if again else (0, 1):
                run.out(value)
            waiting.set()
            if not again:
                await run.cancelled.wait()
            run.end()

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=moody)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call = stream.headers["sllm-call-id"]
            other = await another(nats)
            life = await _life_of(other, call)
            await until(waiting.is_set)

            await _logged(other, life, lambda order: order.delivered == 2)
            await _declared_over(other, life)
            await stream.aread()
        answer = await w.http.get(f"/v1/calls/{call}/events", headers={"last-event-id": "1"})
        assert '"code":"not_deterministic"' in answer.text
        assert "id: " not in answer.text


async def test_a_gateway_that_stood_still_takes_no_call_before_it_knows_that_it_lives(nats: Nats) -> None:
    """One of a life that is over would be gone on with by nobody."""
    w, now = await two(nats), [100.0]
    lives = Lives(w.a._bus, w.a._stored, GATEWAY, os.urandom, lambda: now[0])
    await lives.beat()
    await lives.recorded()
    assert await w.b.claim(lives.me) is not None
    now[0] += STILL_S + 0.1
    taking = asyncio.create_task(lives.recorded())
    with pytest.raises(Over):
        await lives.beat()
    assert not taking.done()
    lives.begin()
    await lives.beat()
    await taking
    now[0] += STILL_S - 0.1
    lives.turn()
    for knows in (lives.recorded, lives.sure):
        await asyncio.wait_for(knows(), 1.0)


async def test_a_life_that_is_over_begins_nothing_and_asks_no_instance(nats: Nats) -> None:
    """Though this gateway has run all the time: it was NATS that did not take its beats."""
    w = await two(nats)
    lives = Lives(w.a._bus, w.a._stored, GATEWAY, os.urandom, time.monotonic)
    await lives.beat()
    assert await w.b.claim(lives.me) is not None
    with pytest.raises(Over):
        await lives.beat()
    waiting = [asyncio.create_task(knows()) for knows in (lives.recorded, lives.sure)]
    await asyncio.sleep(0)
    done = [each.done() for each in waiting]
    lives.begin()
    await lives.beat()
    await asyncio.wait_for(asyncio.gather(*waiting), GIVE_UP_S)
    assert not any(done)


async def test_what_came_as_a_gateway_stood_still_does_not_say_that_it_lives(nats: Nats) -> None:
    """It is read once the process runs again."""
    w, now = await two(nats), [100.0]
    lives = Lives(w.a._bus, w.a._stored, GATEWAY, os.urandom, lambda: now[0])
    await lives.beat()
    lives.turn()
    heard = w.a._bus.heard
    await w.a._bus.flush()
    assert w.a._bus.heard != heard
    now[0] += STILL_S + 0.1
    waiting = asyncio.create_task(lives.sure())
    await asyncio.sleep(0)
    knew = waiting.done()
    await lives.beat()
    await waiting
    assert not knew


@pytest.mark.parametrize("killed", [True, False])
async def test_a_gateway_without_nats_takes_calls_and_does_not_know_that_it_lives_until_a_beat(
    nats: Nats, killed: bool
) -> None:
    """Killed, or standing still, of which nobody hears for long."""
    w, now = await two(nats), [100.0]
    lives = Lives(w.a._bus, w.a._stored, GATEWAY, os.urandom, lambda: now[0])

    def time_passes() -> None:
        for _ in range(5):
            now[0] += STILL_S / 2
            lives.turn()

    await lives.beat()
    if killed:
        await nats.kill()
        await until(lambda: not w.a._bus.connected)
        time_passes()
        await nats.start()
        await until(lambda: w.a._bus.connected)
    else:
        assert nats.server.child is not None
        with suspended(nats.server.child.pid):
            time_passes()
            assert w.a._bus.connected
        await w.a._bus.flush()
    await asyncio.wait_for(lives.recorded(), 1.0)
    knowing = asyncio.create_task(lives.sure())
    await asyncio.sleep(0)
    assert not knowing.done()
    await lives.beat()
    await knowing


async def test_no_instance_is_asked_before_a_gateway_that_was_away_knows_that_it_lives(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It did not run, or had no NATS: its heir may have the stream, at an instance of another class."""
    asked_for, beating, knows, gate = list[str](), asyncio.Event(), asyncio.Event(), asyncio.Event()
    beat, link_open = Lives.beat, Link.open

    async def late(self: Lives, *, over: bool = False) -> None:
        beating.set()
        await knows.wait()
        await beat(self, over=over)

    async def asking(self: Link, node: str, opened: Open, *before: Any) -> Opened:
        asked_for.append(opened.head.call)
        return await link_open(self, node, opened, *before)

    async def waits(run: Run) -> None:
        await gate.wait()
        await six(run)

    monkeypatch.setattr(Link, "open", asking)
    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f", concurrency=1), script=waits)
        answers = [asyncio.create_task(w.http.post("/fn/tokens", json={}, headers=SSE)) for _ in range(2)]
        await until(lambda: len(w.gateway.calls) == 2 and len(w.node.opened) == 1, what="one runs and one waits")
        (second,) = (each for each in w.gateway.calls.open() if each.binding is None)
        monkeypatch.setattr(Lives, "beat", late)
        await beating.wait()
        w.gateway._succession._lives._reached -= STILL_S + 1
        gate.set()
        await until(lambda: second.binding is not None, what="it has a place")
        for _ in range(3):
            await asyncio.sleep(0)
        assert second.id not in asked_for
        knows.set()
        assert all(answer.text.endswith("data: [DONE]\n\n") for answer in await asyncio.gather(*answers))
        assert second.id in asked_for


async def test_a_gateway_whose_machine_slept_takes_no_call_before_it_knows_that_it_lives(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``time.monotonic`` stands still meanwhile."""
    async with world(nats) as w:
        lives, read = w.gateway._succession._lives, time.clock_gettime
        await lives.recorded()
        monkeypatch.setattr(time, "clock_gettime", lambda clock: read(clock) + (clock == time.CLOCK_BOOTTIME) * 600.0)
        lives.turn()
        assert not lives._recorded.is_set()
        await lives.recorded()


async def test_a_bug_that_one_stream_meets_ends_no_log(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(nats) as w:
        broken, logs = list[float](), w.gateway._ledger.logs

        def breaks_once(now: float, *, begun: bool = False) -> list[Log]:
            if not broken:
                broken.append(now)
                raise ValueError("a bug")
            return logs(now, begun=begun)

        monkeypatch.setattr(w.gateway._ledger, "logs", breaks_once)
        await until(lambda: broken, what="it looks for news")

        async def waits(run: Run) -> None:
            await run.cancelled.wait()
            run.end()

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=waits)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call = stream.headers["sllm-call-id"]
            other = await another(nats)
            await _logged(other, await _life_of(other, call), lambda order: order.call == call)


async def test_a_call_whose_end_cannot_be_counted_is_in_no_log_any_more(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=six)

        def breaks(*_: object) -> None:
            raise ValueError("a bug")

        monkeypatch.setattr(w.gateway.metrics, "ended", breaks)
        await w.http.post("/fn/tokens", json={}, headers=SSE)
        await until(lambda: len(w.gateway.calls) == 0)
        assert len(w.gateway._ledger) == 0


async def test_a_new_life_takes_no_call_before_others_can_know_of_it(nats: Nats) -> None:
    """One of a life that nobody knows would be taken over at once."""
    async with world(nats) as w:
        lives, known = w.gateway._succession._lives, list[bool]()

        async def looks(run: Run) -> None:
            known.append(await lives.find(lives.me.life) is not None)
            run.end()

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=looks)
        await w.http.post("/fn/tokens", json={})

        async def beaten() -> bool:
            found = await lives.find(lives.me.life)
            return found is not None and found.beat == lives.me.beat

        for _ in range(3):
            await until(beaten, what="the next beat is a second away")
            lives.begin()
            await w.http.post("/fn/tokens", json={})
        assert known == [True] * 4


# --- a gateway that stops -------------------------------------------------------------------------
async def three(run: Run) -> None:
    """The first half of ``six``."""
    for number in range(3):
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
        run.out(number)
    await run.cancelled.wait()
    run.end()


async def known_to(other: httpx.AsyncClient, function: str) -> None:
    """Until a gateway has its route."""

    async def known() -> bool:
        return (await other.get(f"/v1/models/{function}")).status_code == 200

    await until(known, what="the other gateway knows the function")


def data_of(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]


async def test_streams_of_a_gateway_that_stops_go_on_at_another(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(nats, drain=0.0) as w, second(nats, {"tokens": six}) as other:
        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=three)
        await known_to(other, "tokens")
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            call, parts = stream.headers["sllm-call-id"], stream.aiter_text()
            text = ""
            while "id: 2" not in text:
                text += await anext(parts)
            sent_on, lives = list[bool](), w.gateway._succession._lives
            hand_on = w.gateway.calls.hand_on

            def handing_on(calls: Iterable[Call], why: str) -> None:
                sent_on.append(lives.me.over)
                hand_on(calls, why)

            monkeypatch.setattr(w.gateway.calls, "hand_on", handing_on)
            await w.gateway.drain()
            assert sent_on == [True], "before, the other would say that there is no such call"
            text += "".join([part async for part in parts])
        *values, error = data_of(text)
        assert values == ["0", "1", "2"]
        assert '"code":"call_moved"' in error
        answer = await other.get(f"/v1/calls/{call}/events", headers={"last-event-id": "2"})
        assert data_of(answer.text) == ["3", "4", "5", "[DONE]"]
        assert await w.told(call) == [], "nothing has failed"


async def test_a_stream_that_waits_at_a_gateway_that_stops_begins_at_another(nats: Nats) -> None:
    """Its caller has had nothing of it, and knows its call's id all the same."""
    async with world(nats, drain=0.0, headers_wait=GIVE_UP_S) as w, second(nats, {"tokens": six}) as other:
        await w.deploy(engine("tokens"))
        await known_to(other, "tokens")
        waiting = asyncio.create_task(w.http.post("/fn/tokens", json={}, headers=SSE))
        await until(lambda: w.gateway.calls.dispatcher.waiting("tokens") == 1)
        await w.gateway.drain()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "call_moved")
        await w.controller.route(engine("tokens"), entry(fingerprint="f"))
        answer = await other.get(f"/v1/calls/{answer.headers['sllm-call-id']}/events")
        assert data_of(answer.text)[-7:] == [*map(str, range(6)), "[DONE]"]


async def test_the_streams_of_the_only_gateway_go_on_in_its_next_life(nats: Nats) -> None:
    async with world(nats, drain=0.0) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=three)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            await until(lambda: any(run.outbox.next_index >= 6 for run in w.node.runs.values()))
            await w.gateway.drain()
            assert '"code":"call_moved"' in await _text(stream)
    async with world(nats, {"tokens": six}) as w:
        answer = await w.http.get(f"/v1/calls/{stream.headers['sllm-call-id']}/events", headers={"last-event-id": "2"})
        assert data_of(answer.text) == ["3", "4", "5", "[DONE]"]


async def _text(stream: httpx.Response) -> str:
    return (await stream.aread()).decode()


async def test_a_kept_call_of_a_gateway_that_stops_goes_on_at_another(nats: Nats) -> None:
    async with world(nats, drain=0.0) as w, second(nats, {"tokens": six}) as other:
        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=three)
        await known_to(other, "tokens")
        call = (await w.http.post("/fn/tokens", json={}, headers={"prefer": "respond-async"})).json()["id"]
        await until(lambda: any(run.outbox.next_index >= 6 for run in w.node.runs.values()))
        await w.gateway.drain()
        assert data_of((await other.get(f"/v1/calls/{call}/events")).text) == [*map(str, range(6)), "[DONE]"]


def test_what_has_ended_for_its_caller_is_not_handed_on() -> None:
    """Also where its node has not confirmed that yet. An answer that its caller has not taken whole is."""
    gateway = Gateway()
    for number in range(3):
        gateway.do("begin", number, 1)
    gateway.do("write", 0, 1)
    goes_on, cancelled, lagging = gateway.calls.values()
    cancelled.go(CallState.CANCELLED)
    for state in (CallState.RUNNING, CallState.SUCCEEDED):
        lagging.go(state)
    lagging.writing = 1.0
    assert gateway.ledger.hand_on() == {goes_on, lagging}
    for number in range(3):
        gateway.do("end", number, 1)
    gateway.do("write", 0, 1)
    assert [each.order.call for each in streams(gateway.logs)] == [goes_on.id, lagging.id]


async def test_a_life_that_ends_in_order_is_taken_over_before_the_next_beat() -> None:
    claimed = asyncio.Event()

    async def claim(_: Life) -> None:
        claimed.set()

    found = roll(OTHER)
    none = cast(Any, None)
    lives = cast(Lives, SimpleNamespace(me=ME, claim=claim))
    succession = Succession(lives, found, Ledger(), none, none, none, none, lambda: 0.0)
    looking = asyncio.create_task(succession._look())
    try:
        succession._heard(replace(OTHER, beat=1))
        succession._heard(replace(OTHER, beat=2, over=True))
        await asyncio.wait_for(claimed.wait(), GIVE_UP_S)
    finally:
        await end({looking})


async def test_others_are_silent_by_beats_alone_that_were_taken_while_they_could_be_heard() -> None:
    claimed = list[Life]()

    async def claim(life: Life) -> None:
        claimed.append(life)

    async def find(_: str) -> Life:
        return OTHER

    none, watch = cast(Any, None), SimpleNamespace(synced=asyncio.Event())
    lives = cast(Lives, SimpleNamespace(me=ME, claim=claim, find=find))
    succession = Succession(lives, roll(OTHER), Ledger(), none, none, none, none, lambda: 0.0)
    succession._watch = cast(Any, watch)

    async def looks(*, beaten: bool, times: int = SILENT_BEATS) -> None:
        for _ in range(times):
            if beaten:
                succession._has_beaten()
            succession._news.set()
            await succession._look()

    await looks(beaten=True)
    assert not claimed, "nothing was heard of them"
    watch.synced.set()
    await looks(beaten=True, times=1)
    await looks(beaten=False)
    assert not claimed, "it has looked for another reason"
    await looks(beaten=True, times=SILENT_BEATS - 2)
    assert not claimed
    await looks(beaten=True, times=1)
    assert claimed == [OTHER]


async def test_what_is_left_is_told_and_stored_before_it_is_said_that_a_life_has_ended() -> None:
    """And after a beat, since nobody knows whether what was being written as it was broken off is stored."""
    did, gateway = list[str](), Gateway()
    gateway.do("begin", 0, 1)

    async def beat(*, over: bool = False) -> None:
        did.append("over" if over else "beat")

    async def store() -> None:
        did.append("store")
        lives.behind = False

    def tell(_: Log) -> None:
        did.append("tell")
        lives.behind = True

    async def close() -> None:
        """Nothing is open."""

    lives = SimpleNamespace(me=ME, beat=beat, store=store, tell=tell, behind=False)
    none, closes = cast(Any, None), cast(Any, SimpleNamespace(close=close))
    succession = Succession(cast(Lives, lives), roll(), gateway.ledger, closes, none, none, none, lambda: 0.0)
    succession._watch = closes
    await succession.close()
    assert did == ["beat", "tell", "store", "over"]


async def test_the_last_ids_are_told_before_a_life_ends() -> None:
    """However short a time ago all streams were looked at for some."""
    told, gateway = list[Log](), Gateway()
    for what in ("begin", "write", "ids"):
        gateway.do(what, 0, 1)

    async def beat(*, over: bool = False) -> None:
        """Taken."""

    async def close() -> None:
        """Nothing is open."""

    lives = cast(Lives, SimpleNamespace(me=ME, beat=beat, tell=told.append, behind=False))
    none, closes = cast(Any, None), cast(Any, SimpleNamespace(close=close))
    succession = Succession(lives, roll(), gateway.ledger, closes, none, none, none, lambda: 1.0)
    succession._looked, succession._watch = 1.0, closes
    await succession.close()
    assert [type(entry) for log in told for entry in log.entries] == [More]


async def test_where_what_was_written_is_lost_all_is_told_anew() -> None:
    given_up, gateway = list[bool](), Gateway()
    gateway.do("begin", 0, 1)
    gateway.do("write", 0, 1)

    async def store() -> None:
        raise Lost

    async def pause(_: float) -> None:
        """Not here."""

    lives = cast(Lives, SimpleNamespace(me=ME, behind=True, store=store, anew=lambda: given_up.append(True)))
    none = cast(Any, None)
    succession = Succession(lives, roll(), gateway.ledger, none, none, none, none, lambda: 0.0, pause)
    succession._due = 1.0
    await succession._store()
    assert given_up, "nothing of before is stored behind it"
    gateway.do("beginnings", 0, 1)
    assert [type(entry) for entry in gateway.logs[-1].entries] == [Whole]
    assert len(gateway.logs) == 2


async def test_what_begins_while_a_life_that_is_over_is_written_down_is_written_too() -> None:
    gateway, kept, ended, looked = Gateway(), list[str](), list[str](), set[str]()
    gateway.do("begin", 0, 1)
    gateway.do("write", 0, 1)

    async def create(_: str, call: str, entry: object, *__: Any, **___: Any) -> bool:
        if isinstance(entry, CallOrder):
            kept.append(call)
            gateway.do("begin", 1, 1)
            gateway.do("write", 0, 1)
        return True

    async def has(_: str) -> bool:
        return False

    def hand_on(calls: Iterable[Call], _: str) -> None:
        ended.extend(call.id for call in calls)

    lives = cast(Lives, SimpleNamespace(me=ME, begin=lambda: None))
    journal, taking_up = (
        cast(Any, SimpleNamespace(create=create, has=has)),
        cast(Any, SimpleNamespace(look=looked.update)),
    )
    none = cast(Any, None)
    succession = Succession(lives, roll(), gateway.ledger, none, journal, taking_up, hand_on, lambda: 0.0)
    await succession._end_life()
    assert kept == ended == ["call-0", "call-1"]
    assert looked == set(kept)


async def test_a_stream_of_a_gateway_that_lives_is_not_found_at_another(nats: Nats) -> None:
    """Once that one has beaten twice."""
    async with world(nats) as w, second(nats) as other:
        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=_forever)
        async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
            answer = await other.get(f"/v1/calls/{stream.headers['sllm-call-id']}/events")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "call_not_found")


async def _forever(run: Run) -> None:
    run.out(0)
    await run.cancelled.wait()
    run.end()


async def another(nats: Nats) -> Lives:
    """What another gateway would see of them."""
    bus = await nats.bus(GATEWAY_2)
    return Lives(bus, Stored(bus), GATEWAY_2, repeating(b"o"), time.monotonic)


async def _logged(lives: Lives, life: str, as_it_is: Callable[[CallOrder], bool]) -> None:
    """Until the log of ``life`` has one stream, and that ``as_it_is``."""

    async def logged() -> bool:
        return [as_it_is(each.order) for each in streams((await lives.log_of(life)).values())] == [True]

    await until(logged, what="its stream is logged as it is")


async def _declared_over(lives: Lives, life: str) -> None:
    """By ``lives``, between two beats of it."""

    async def claimed() -> bool:
        found = await lives.find(life)
        return found is not None and await lives.claim(found) is not None

    await until(claimed, what="it is declared over between two beats")


async def _life_of(lives: Lives, call: str) -> str:
    """The life that a call's id begins with."""
    found = Roll("nobody")
    watch = lives.watch(found.heard)
    await watch.start()
    try:
        await until(lambda: found.of_call(call), what="its life is known")
    finally:
        await watch.close()
    life = found.of_call(call)
    assert life is not None
    return life.life


async def test_a_call_that_another_gateway_goes_on_with_is_told_of_there_alone(nats: Nats) -> None:
    """Who asks here is answered by that one, and readers see what it waits for there."""
    async with world(nats) as w:
        known = []
        for number, error in enumerate((Unavailable("it ended here"), CallMoved("it goes on elsewhere"))):
            call = a_call(number)
            call.error = error
            w.gateway._recent.ended(call)
            known.append(w.gateway._recent.here(call.id) is not None)
    assert known == [True, False]


async def test_a_life_that_was_taken_over_before_it_had_streams_is_not_gone_on_with(nats: Nats) -> None:
    """Its gateway was away from NATS for minutes, and has a stream since. Its heir takes what is told of it for what a
    gateway tells that woke and may die, so it makes a kept call of it: the stream is to end here."""
    async with world(nats) as w:
        wakes = asyncio.Event()

        async def waits(run: Run) -> None:
            run.out(0)
            await wakes.wait()
            run.end()

        own = w.gateway._succession
        lives, life = own._lives, own._lives.me.life
        bus = await nats.bus(GATEWAY_2)
        journal = Journal(bus, Stored(bus))
        heir = succession_of(bus, Lives(bus, Stored(bus), GATEWAY_2, repeating(b"o"), time.monotonic), journal)
        await heir.start()
        try:
            await until(lambda: heir._roll.beat_of(life) >= 0, what="the heir knows it")
            own._due = math.inf
            await until(lambda: life in heir._taken and heir._taken[life].until, what="it is taken over")
            assert not heir._taken[life].calls
            await w.deploy(engine("tokens"), entry(fingerprint="f"), script=waits)
            lives._clock = lambda: time.monotonic() + LIVES_AGE_S
            lives._turned = lives._clock()  # it ran all the time
            await (await nats.bus(CONTROLLER)).jetstream.purge_stream(LIVES_STREAM, subject=life_beat(life))
            async with w.http.stream("POST", "/fn/tokens", json={}, headers=SSE) as stream:
                await until(lambda: lives.me.life != life, what="it has begun another life")
                wakes.set()
                text = "".join([part async for part in stream.aiter_text()])
            assert '"code":"call_moved"' in text
            assert await journal.has(stream.headers["sllm-call-id"])
        finally:
            await heir.close()
