"""A call that moves to another instance while it runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_gateway import move as moving
from sllm_gateway.binding import Binding
from sllm_gateway.move import GAP, LAST, MOST_ROUNDS, QUIET_S, ROUNDS, STOP_S, TOGETHER_S, Move, Next
from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import Cancelled, InstanceLost, NotDeterministic
from sllm_runtime.protocol.frames import End, Feed, Frame, FrameKind, Ids, Open, Opened
from sllm_runtime.protocol.limits import FEED_IDS, MAX_PART
from sllm_runtime.protocol.timeline import parse_comment
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, World, entry, world
from tests.unit.gateway.test_faults import SSE, values
from tests.unit.gateway.test_resumption import engine

# --- what is new to the caller ----------------------------------------------------------------------
NOW = 16.0
Step = tuple[int, tuple[int, ...], list[bytes]]
"""A generation, ids that it drew, and the parts of the output that follows (none: no output yet)."""
steps = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple),
        st.lists(st.binary(min_size=1, max_size=3), max_size=3),
    ),
    min_size=1,
    max_size=12,
)


def frames_of(answer: list[Step], *, delivered: int = 0, upto: int | None = None) -> list[Frame]:
    """What a worker sends of ``answer``, whose first ``delivered`` outputs it leaves out."""
    found: list[Frame] = []
    first: dict[int, int] = defaultdict(int)
    outputs = 0
    for generation, ids, parts in answer[:upto]:
        found.append(Frame(0, FrameKind.IDS, codec.pack(Ids(generation, first[generation], ids))))
        first[generation] += len(ids)
        outputs += bool(parts)
        if outputs > delivered:
            found += [Frame(0, FrameKind.OUTPUT, part, at < len(parts) - 1) for at, part in enumerate(parts)]
    return [*found, Frame(0, FrameKind.END, codec.pack(End()))] if upto is None else found


def move_of(kept: Resumption, round_: int = 1, *, source_holds: bool = False) -> Move:
    return Move(Binding("call", 2, entry("i2"), b"", 1 << 20, NOW), kept, round_, source_holds=source_holds)


def given_out(frames: list[Frame]) -> bytes:
    return b"".join(frame.data + b"," * (not frame.more) for frame in frames if frame.kind is FrameKind.OUTPUT)


@given(steps, st.integers(0, 2**32))
def test_nothing_is_lost_repeated_or_different(answer: list[Step], seed: int) -> None:
    """Wherever it is begun, however far either of them is, and in whatever pieces it comes."""
    chance = random.Random(seed)
    kept, caller = Resumption(), list[Frame]()
    source = frames_of(answer)

    def arrive(frames: list[Frame]) -> None:
        kept.take(frames)
        caller.extend(frames)

    told = len(frames_of(answer, upto=chance.randint(0, len(answer))))
    arrive(source[:told])
    kept.watch()
    move = move_of(kept)
    rest, there = source[told:-1], frames_of(answer, delivered=kept.delivered)
    while not move.switched:
        count = chance.randint(0, 3)
        arrive(rest[:count])
        del rest[:count]
        count = chance.randint(0, 3)
        assert move.take(there[:count], NOW)[0] == []
        del there[:count]
        if move.ready and (not rest or not there or chance.random() < 0.5):
            arrive(move.switch()[0])
    while there:
        count = chance.randint(1, 3)
        arrive(move.take(there[:count], NOW)[0])
        del there[:count]
    assert move.over
    assert given_out(caller) == given_out(source)
    assert caller[-1].kind is FrameKind.END
    right = Resumption()
    right.take(source)
    assert kept.recorded == right.recorded
    assert kept.digest == right.digest


class Resting:
    """A destination that gives out what it was told of ``answer`` and no more, until it is let."""

    def __init__(self, answer: list[Step], kept: Resumption) -> None:
        self.left = frames_of(answer, delivered=kept.delivered)
        self.told = dict(kept.counts)
        self.let = False

    def hear(self, feeds: list[Feed]) -> None:
        for feed in feeds:
            known = self.told.get(feed.generation, 0)
            if feed.first <= known:
                self.told[feed.generation] = max(known, feed.first + len(feed.ids))
            self.let = self.let or not feed.held

    def say(self, most: int) -> list[Frame]:
        found: list[Frame] = []
        while self.left and len(found) < most and self._may(self.left[0]):
            found.append(self.left.pop(0))
        return found

    def _may(self, frame: Frame) -> bool:
        if frame.kind is FrameKind.IDS and not self.let:
            ids = codec.unpack(Ids, frame.data)
            return ids.first + len(ids.ids) <= self.told.get(ids.generation, 0)
        return self.let or frame.kind is not FrameKind.END


@given(steps, st.integers(0, 2**32))
def test_one_that_rests_goes_on_with_the_same(answer: list[Step], seed: int) -> None:
    """Whenever it is told what: it goes over, and before that it says nothing that its source has not."""
    chance, now = random.Random(seed), NOW
    kept, caller = Resumption(), list[Frame]()
    source = frames_of(answer)

    def arrive(frames: list[Frame]) -> None:
        kept.take(frames)
        caller.extend(frames)

    told = len(frames_of(answer, upto=chance.randint(1, len(answer))))
    arrive(source[:told])
    kept.watch()
    move, there, rest = move_of(kept, source_holds=chance.random() < 0.5), Resting(answer, kept), source[told:-1]
    move.feeds = move.holds = True
    for _ in range(1000):
        count, now = chance.randint(0, 3), now + QUIET_S / 4
        heard, rest = rest[:count], rest[count:]
        arrive(heard)
        after_output = bool(heard) and heard[-1].kind is FrameKind.OUTPUT and not heard[-1].more
        if heard:
            move.heard(now, after_output=after_output)
        assert move.take(there.say(chance.randint(0, 5)), now)[0] == []
        match move.next([], now, after_output=after_output):
            case Next.STOP:
                there.hear(move.stop(now))
            case Next.FEED:
                there.hear(move.feed(now))
            case Next.DRAW:
                there.hear(move.let_draw())
            case Next.SWITCH:
                arrive(move.switch()[0])
                there.hear(move.let_draw())
                break
    assert move.switched
    assert there.let
    while frames := there.say(chance.randint(1, 3)):
        arrive(move.take(frames, now)[0])
    assert move.over
    assert given_out(caller) == given_out(source)
    assert caller[-1].kind is FrameKind.END
    assert kept.recorded == recorded(source)


def recorded(frames: list[Frame]) -> tuple[tuple[int, ...], ...]:
    right = Resumption()
    right.take(frames)
    return right.recorded


def resting(answer: list[Step], upto: int, *, source_holds: bool = False) -> tuple[Resumption, Move]:
    """A destination that has what it was opened with: the first ``upto`` steps."""
    kept = Resumption()
    kept.take(frames_of(answer, upto=upto))
    kept.watch()
    move = move_of(kept, source_holds=source_holds)
    move.feeds = move.holds = True
    move.take(frames_of(answer, delivered=upto, upto=upto), NOW)
    move.heard(NOW)
    return kept, move


SINGLE: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]


def test_one_that_rests_goes_over_after_an_output_of_its_source() -> None:
    kept, move = resting(SINGLE, 4)
    assert move.next([], NOW) is Next.WAIT
    kept.take(frames_of(SINGLE, upto=4 + LAST)[8:])
    assert (move.gap, move.next([], NOW)) == (LAST, Next.WAIT)
    assert move.next([], NOW, after_output=True) is Next.SWITCH
    move.switch()
    assert move.let_draw() == [Feed("call", 2, 0, 4, (4, 5, 6, 7))]
    move.take(frames_of(SINGLE, delivered=4, upto=8)[4:], NOW)
    assert (move.level, move.over) == (True, False), "nobody knows that it has heard"
    move.take(frames_of(SINGLE, upto=9)[16:], NOW)
    assert move.over


def test_a_source_that_can_stop_does_before_the_switch() -> None:
    """What is missing is computed there meanwhile, so that one token is missing then."""
    kept, move = resting(SINGLE, 4, source_holds=True)
    kept.take(frames_of(SINGLE, upto=7)[8:])
    assert [move.next([], NOW, after_output=after) for after in (False, True)] == [Next.WAIT, Next.STOP]
    assert (move.may_stop, move.stop(NOW)) == (True, [Feed("call", 2, 0, 4, (4, 5, 6), True)])
    assert (move.stopping, move.may_stop, move.may_join, move.abreast) == (True, False, False, True)
    assert move.next([], NOW + STOP_S / 2) is Next.WAIT
    move.take(frames_of(SINGLE, delivered=4, upto=7)[4:], NOW)
    kept.take(frames_of(SINGLE, upto=8)[14:])
    move.heard(NOW + STOP_S / 2, after_output=True)
    assert (move.gap, move.next([], NOW + STOP_S / 2)) == (1, Next.SWITCH)
    move.switch()
    assert move.let_draw() == [Feed("call", 2, 0, 7, (7,))]


def test_calls_that_stop_together_go_over_together() -> None:
    (kept, move), (_, other) = (resting(SINGLE, 4, source_holds=True) for _ in range(2))
    for each in (move, other):
        assert each.stop(NOW) == [], "nothing is missing"
    kept.take(frames_of(SINGLE, upto=5)[8:])
    move.heard(NOW, after_output=True)
    assert (move.next([other], NOW), other.next([move], NOW)) == (Next.WAIT, Next.WAIT)
    other.heard(NOW, after_output=True)
    assert (move.next([other], NOW), other.next([move], NOW)) == (Next.SWITCH, Next.SWITCH)


@pytest.mark.parametrize(("before", "waits"), [(0.0, STOP_S), (0.2, 0.4), (2.0, QUIET_S)])
def test_a_source_that_tells_nothing_more_is_not_waited_for(before: float, waits: float) -> None:
    """Twice as long as it was ever silent before: it was in no step."""
    _, move = resting(SINGLE, 4, source_holds=True)
    move.heard(NOW + before, after_output=True)
    now = NOW + before
    move.stop(now)
    move.heard(now)
    assert [move.next([], now + at) for at in (waits - 0.01, waits + 0.01)] == [Next.WAIT, Next.SWITCH]


def test_one_that_stops_does_not_go_over_within_an_output() -> None:
    kept, move = resting(SINGLE, 4, source_holds=True)
    move.stop(NOW)
    kept.take([Frame(0, FrameKind.OUTPUT, b"4", True)])
    assert move.next([], NOW + QUIET_S) is Next.WAIT
    kept.take([Frame(0, FrameKind.OUTPUT, b"4")])
    move.heard(NOW + QUIET_S, after_output=True)
    assert move.next([], NOW + QUIET_S) is Next.SWITCH


def test_all_have_computed_what_they_were_told_before_any_stops() -> None:
    """One says ids when it hears them: only the last one says that they are computed."""
    (_, move), (kept, other) = (resting(SINGLE, 4, source_holds=True) for _ in range(2))
    kept.take(frames_of(SINGLE, upto=9)[8:])
    assert other.may_join
    other.feed(NOW)
    other.take(frames_of(SINGLE, delivered=4, upto=8)[4:], NOW)
    assert (other.gap, other.abreast, other.may_join) == (1, False, False)
    assert move.next([other], NOW, after_output=True) is Next.WAIT
    other.take(frames_of(SINGLE, upto=9)[16:17], NOW)
    other.take([Frame(0, FrameKind.OUTPUT, b"x")], NOW)
    assert other.abreast
    assert move.next([other], NOW, after_output=True) is Next.STOP


def test_a_source_that_is_quiet_is_not_waited_for() -> None:
    _, move = resting(SINGLE, 4)
    assert [move.next([], NOW + at) for at in (QUIET_S / 2, QUIET_S)] == [Next.WAIT, Next.SWITCH]


def test_a_source_without_outputs_is_not_waited_for() -> None:
    kept, move = resting(SINGLE, 4)
    assert move.next([], NOW) is Next.WAIT
    kept.take(frames_of(SINGLE, upto=5)[8:9])
    move.heard(NOW + QUIET_S - 0.01)
    assert move.next([], NOW + QUIET_S) is Next.SWITCH


def test_one_that_rests_and_lacks_more_is_told_all_of_it_at_once() -> None:
    kept, move = resting(SINGLE, 4)
    kept.take(frames_of(SINGLE, upto=5 + LAST)[8:])
    assert move.next([], NOW) is Next.FEED
    assert move.feed(NOW) == [Feed("call", 2, 0, 4, (4, 5, 6, 7, 8), True)]
    assert move.next([], NOW, after_output=True) is Next.WAIT
    assert move.forward() == [], "it draws nothing, so it is late with nothing"


def test_one_that_rests_and_lacks_outputs_alone_draws() -> None:
    """Its generation is over, and code of the function goes on: no id brings it there."""
    kept, move = resting(SINGLE, 4)
    kept.take([Frame(0, FrameKind.OUTPUT, b"code")] * (LAST + 1))
    assert move.next([], NOW) is Next.FEED
    assert move.feed(NOW) == []
    move.take([], NOW)
    assert [move.next([], NOW + at) for at in (QUIET_S / 2, QUIET_S)] == [Next.WAIT, Next.DRAW]
    assert move.let_draw() == [Feed("call", 2, 0, 0, ())]
    assert not move.holding
    move.take([Frame(0, FrameKind.OUTPUT, b"code")] * (LAST + 1), NOW)
    assert move.next([], NOW) is Next.SWITCH


def test_one_that_rests_and_says_nothing_of_a_later_generation_draws() -> None:
    """It runs when an earlier one has ended, of which the source alone knows."""
    kept, move = resting(SINGLE, 4)
    kept.take([Frame(0, FrameKind.IDS, codec.pack(Ids(1, 0, (5,) * (LAST + 1))))])
    assert move.next([], NOW) is Next.FEED
    assert move.feed(NOW) == [Feed("call", 2, 1, 0, (5,) * (LAST + 1), True)]
    assert [move.next([], NOW + at) for at in (QUIET_S, TOGETHER_S - 1, TOGETHER_S)] == [Next.WAIT] * 2 + [Next.DRAW]


def test_one_that_has_not_said_whether_it_rests_is_let_draw() -> None:
    kept = Resumption()
    kept.take(frames_of(SINGLE, upto=2))
    kept.watch()
    move = move_of(kept)
    assert move.let_draw() == [Feed("call", 2, 0, 0, ())]
    move = move_of(kept)
    move.holds = False
    assert move.let_draw() == []


def test_it_is_ready_when_little_is_missing_or_after_the_last_round() -> None:
    kept = Resumption()
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]
    kept.take(frames_of(answer, upto=4))
    kept.watch()
    moves = [move_of(kept, number) for number in (1, ROUNDS)]
    kept.take(frames_of(answer, upto=10)[8:])
    for move in moves:
        assert not move.computed
        move.take(frames_of(answer, delivered=4, upto=4), NOW)
        assert move.computed
        assert move.gap == 6
    assert [move.ready for move in moves] == [False, True]
    moves[0].take(frames_of(answer, delivered=4, upto=8)[4:], NOW)
    assert moves[0].gap == 2
    assert moves[0].ready


def test_one_that_is_fed_is_level_when_the_source_stops() -> None:
    kept = Resumption()
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]
    kept.take(frames_of(answer, upto=4))
    kept.watch()
    moves = [move_of(kept, number) for number in (1, ROUNDS)]
    kept.take(frames_of(answer, upto=6)[8:])
    for move in moves:
        move.feeds = True
        move.take(frames_of(answer, delivered=4, upto=5), NOW)
        assert (move.computed, move.gap) == (True, 1)
    assert [move.ready for move in moves] == [False, True], "after some rounds a token or two may be missing"
    moves[0].take(frames_of(answer, delivered=4, upto=6)[6:], NOW)
    assert (moves[0].gap, moves[0].ready) == (0, True)


def test_one_that_is_fed_gets_more_rounds_while_much_is_missing() -> None:
    kept = Resumption()
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]
    kept.take(frames_of(answer, upto=4))
    kept.watch()
    moves = [move_of(kept, number) for number in (ROUNDS, MOST_ROUNDS)]
    kept.take(frames_of(answer, upto=4 + GAP + 1)[8:])
    for move in moves:
        move.feeds = True
        move.take(frames_of(answer, delivered=4, upto=4), NOW)
        assert (move.computed, move.gap) == (True, GAP + 1)
    assert [move.ready for move in moves] == [False, True]


def test_a_destination_prefills_what_it_was_told_and_what_it_is_fed() -> None:
    kept = Resumption()
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]
    kept.take(frames_of(answer, upto=4))
    kept.watch()
    move = move_of(kept)
    move.feeds = True
    assert (move.filling, move.abreast) == (True, False)
    move.take(frames_of(answer, delivered=4, upto=4), NOW)
    assert (move.filling, move.abreast) == (False, True)
    kept.take(frames_of(answer, upto=4 + GAP + 1)[8:])
    assert (move.filling, move.abreast) == (False, False)


def test_a_destination_that_draws_all_again_prefills_nothing() -> None:
    kept = Resumption()
    kept.take([Frame(0, FrameKind.OUTPUT, b"x")])
    kept.watch()
    move = move_of(kept)
    assert (move.computed, move.filling, move.abreast) == (False, False, True)


def test_it_waits_for_others_so_long_and_no_longer() -> None:
    """A call that is level goes over when the destination has nothing of others to prefill, one that is not is fed when
    they have begun."""
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]
    kept = Resumption()
    kept.take(frames_of(answer, upto=4))
    kept.watch()
    move, other = move_of(kept), move_of(kept)
    move.feeds = other.feeds = True
    move.take(frames_of(answer, delivered=4, upto=4), NOW)
    assert move.ready
    assert other.filling
    assert [move.waits([other], at) for at in (NOW, NOW + TOGETHER_S - 1, NOW + TOGETHER_S)] == [True, True, False]
    assert not move.waits([], NOW)
    kept.take(frames_of(answer, upto=4 + GAP + 1)[8:])
    assert not move.ready
    assert move.waits([other], NOW)
    other.take(frames_of(answer, delivered=4, upto=4), NOW)
    assert not move.waits([other], NOW), "it is to be fed"
    move.take(frames_of(answer, delivered=4, upto=4 + GAP + 1)[4:], NOW)
    assert move.ready
    assert move.waits([other], NOW), "what the other lacks is a prefill too"
    other.take(frames_of(answer, delivered=4, upto=5)[4:], NOW)
    assert not move.waits([other], NOW)


def test_one_that_is_not_fed_waits_for_nobody() -> None:
    kept = Resumption()
    kept.take(frames_of([(0, (1,), [b"x"])], upto=1))
    kept.watch()
    move, other = move_of(kept), move_of(kept)
    move.take(frames_of([(0, (1,), [b"x"])], delivered=1, upto=1), NOW)
    assert move.waits([other], NOW), "nobody has said that it takes none"
    move.feeds = False
    assert not move.waits([other], NOW)


def test_a_round_feeds_what_is_missing() -> None:
    kept = Resumption()
    answer: list[Step] = [(number % 2, (number, number), [b"x"]) for number in range(10)]
    kept.take(frames_of(answer, upto=2))
    kept.watch()
    move = move_of(kept)
    kept.take(frames_of(answer, upto=10)[4:])
    assert move.lacking() == [], "it takes none"
    move.feeds = True
    move.take(frames_of(answer, delivered=2, upto=4), NOW)
    assert (move.computed, move.gap) == (True, 6)
    assert move.feed(NOW) == [Feed("call", 2, 0, 4, (4, 4, 6, 6, 8, 8)), Feed("call", 2, 1, 4, (5, 5, 7, 7, 9, 9))]
    assert (move.computed, move.round) == (False, 2)
    move.take(frames_of(answer, delivered=2, upto=9)[6:], NOW)
    assert not move.computed
    assert move.lacking() == [Feed("call", 2, 1, 8, (9, 9))]
    move.take(frames_of(answer, delivered=2, upto=10)[16:], NOW)
    assert move.computed
    assert move.ready


def test_what_the_source_tells_goes_on_to_a_destination_that_has_begun() -> None:
    kept = Resumption()
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(20)]
    kept.take(frames_of(answer, upto=4))
    kept.watch()
    move = move_of(kept)
    move.feeds = True
    kept.take(frames_of(answer, upto=6)[8:])
    assert move.forward() == [], "it still computes what it was told at its opening"
    move.take(frames_of(answer, delivered=4, upto=4), NOW)
    assert move.forward() == [Feed("call", 2, 0, 4, (4, 5))]
    assert move.forward() == []
    kept.take(frames_of(answer, upto=7)[12:])
    assert move.forward() == [Feed("call", 2, 0, 6, (6,))]
    assert (move.round, move.computed) == (1, True), "that is no round"
    assert move.lacking() == [Feed("call", 2, 0, 4, (4, 5, 6))], "any of these may be lost"
    move.take(frames_of(answer, delivered=4, upto=9)[4:], NOW)
    kept.take(frames_of(answer, upto=9)[14:])
    assert move.forward() == [], "it has drawn them itself"
    move.feeds = False
    kept.take(frames_of(answer, upto=10)[18:])
    assert move.forward() == []


def test_ids_are_fed_in_messages_of_a_bounded_size() -> None:
    kept = Resumption()
    move = move_of(kept)
    move.feeds = True
    ids = tuple(range(2 * FEED_IDS + 1))
    kept.take([Frame(0, FrameKind.IDS, codec.pack(Ids(0, 0, ids)))])
    fed = move.feed(NOW)
    assert [(item.first, len(item.ids)) for item in fed] == [(0, FEED_IDS), (FEED_IDS, FEED_IDS), (2 * FEED_IDS, 1)]
    assert tuple(number for item in fed for number in item.ids) == ids


def test_it_does_not_switch_within_an_output() -> None:
    kept = Resumption()
    kept.watch()
    move = move_of(kept)
    kept.take([Frame(0, FrameKind.OUTPUT, b"1", True)])
    move.take([Frame(0, FrameKind.OUTPUT, b"1", True)], NOW)
    assert move.computed
    assert not move.ready
    kept.take([Frame(0, FrameKind.OUTPUT, b"2")])
    move.take([Frame(0, FrameKind.OUTPUT, b"2")], NOW)
    assert move.ready


@pytest.mark.parametrize("kind", [FrameKind.IDS, FrameKind.OUTPUT])
def test_another_answer_is_none(kind: FrameKind) -> None:
    kept = Resumption()
    kept.watch()
    move = move_of(kept)
    right: list[Step] = [(0, (1, 2), [b"a"])]
    wrong: list[Step] = [(0, (1, 3), [b"a"])] if kind is FrameKind.IDS else [(0, (1, 2), [b"b"])]
    kept.take(frames_of(right, upto=1))
    with pytest.raises(NotDeterministic):
        move.take(frames_of(wrong, upto=1), NOW)


def test_another_answer_that_came_first_is_found_at_the_switch() -> None:
    kept = Resumption()
    kept.watch()
    move = move_of(kept)
    move.take(frames_of([(0, (1,), [b"b"])], upto=1)[1:], NOW)
    kept.take(frames_of([(0, (1,), [b"a"])], upto=1)[1:])
    with pytest.raises(NotDeterministic):
        move.switch()


# --- the whole gateway ------------------------------------------------------------------------------
TOTAL = 20


class Scene:
    """``draw`` on instance i1, and on i2 where it moves to; each draws as many ids as ``pace`` says."""

    def __init__(self, w: World) -> None:
        self.w = w
        self.pace: dict[str, int] = defaultdict(int)
        self.total = TOTAL
        self.value: Callable[[Run, int], Any] = lambda _, number: number
        self.drawn: Callable[[Run, int], int] = lambda _, number: number * 7
        self.dies_at: dict[str, int] = {}
        self.last = -1
        """The id that one is drawing when it is told to draw no more."""
        self.ids = True
        self.held: asyncio.Event | None = None
        """What the first run at i2 waits for before it says a word."""
        self.holds: Callable[[Run], bool] = lambda run: run.head.epoch == 2
        self.rests = False
        """Whether i2 draws nothing of a call that is held, until it was told to ``deaf`` + 1 times."""
        self.deaf = 0
        self.stands = ""
        """An instance that gives out nothing beyond what it was opened with."""

    async def deploy(self, *, moves: bool = False) -> None:
        source = entry("i1", fingerprint="f", moves_to="i2" if moves else "")
        more = [entry("i2", fingerprint="f")] if moves else []
        await self.w.deploy(engine("draw"), source, *more, script=self.draw)

    async def draw(self, run: Run) -> None:
        """As a worker does: gives out the ids again that it was told, and leaves out what the caller has."""
        known = run.head.recorded[0] if run.head.recorded else ()
        name = run.head.instance
        if self.held is not None and self.holds(run) and not await self._let_go(run, self.held):
            run.end(Cancelled("stopped"))
            return
        for number in range(self.total):
            if self.dies_at.get(name) == number:
                run.end(InstanceLost(f"{name} died"))
                return
            if number >= len(known) and not await self._turn(run, number):
                run.end(Cancelled("stopped"))
                return
            if self.ids:
                run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (self.drawn(run, number),))))
            if number >= run.head.delivered:
                run.out(self.value(run, number))
            run.node.flush(run)
        run.end()

    async def _let_go(self, run: Run, held: asyncio.Event) -> bool:
        await until(lambda: held.is_set() or run.cancelled.is_set())
        return held.is_set()

    async def _turn(self, run: Run, number: int) -> bool:
        def go() -> bool:
            may = not (self.rests and run.head.held) or sum(not item.held for item in run.fed) > self.deaf
            may = may and (not run.held or number <= self.last)
            goes = (may and self.pace[run.head.instance] > number) or fed(run) > number
            return (goes and self.stands != run.head.instance) or run.cancelled.is_set()

        await until(go)
        return not run.cancelled.is_set()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[asyncio.Task[httpx.Response]]:
        """A call that has begun at i1 and has ten values."""
        await self.deploy()
        self.pace["i1"] = 10
        task = asyncio.create_task(self.w.http.post("/fn/draw", json={}, headers=SSE, timeout=60))
        try:
            await until(lambda: self.acked("i1") >= (20 if self.ids else 10))
            yield task
        finally:
            task.cancel()
            await asyncio.wait([task])

    def runs(self, instance: str) -> list[Run]:
        return [run for run in self.w.node.runs.values() if run.head.instance == instance]

    def acked(self, instance: str) -> int:
        return max((run.outbox.acked for run in self.runs(instance)), default=0)

    async def first_feed(self) -> Run:
        """The call moves to a destination that takes ids, which is told of six that its source drew meanwhile."""
        held = self.held = asyncio.Event()
        self.w.node.judge = lambda _: Opened(status="accepted", feeds=True)
        await self.deploy(moves=True)
        await until(lambda: self.runs("i2"))
        self.pace["i1"] = 16
        await until(lambda: self.acked("i1") >= 32)
        held.set()
        (second,) = self.runs("i2")
        await until(lambda: second.fed)
        return second

    async def to_one_that_rests(self) -> Run:
        """The call moves to a destination that is held, which has what it was told."""
        self.rests, self.pace["i2"] = True, self.total
        self.w.node.judge = lambda _: Opened(status="accepted", feeds=True, holds=True)
        await self.deploy(moves=True)
        await until(lambda: self.acked("i2") >= 10 if self.runs("i2") else False)
        (second,) = self.runs("i2")
        return second

    async def moved(self) -> float:
        text = (await self.w.http.get("/metrics")).text
        lines = [line for line in text.split("\n") if line.startswith("sllm_calls_moved_total{")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def fed(run: Run) -> int:
    """How many ids it has been told while it ran."""
    return max((item.first + len(item.ids) for item in run.fed), default=0)


@asynccontextmanager
async def scene(nats: Nats, *, holds: bool = False) -> AsyncIterator[Scene]:
    """``holds``: instances take ``Hold``."""
    async with world(nats) as w:
        if holds:
            w.node.judge = lambda _: Opened(status="accepted", feeds=True, holds=True)
        yield Scene(w)


async def test_a_running_call_goes_on_at_the_destination(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        text = (await call).text
        assert values(text) == list(range(TOTAL))
        (first,), (second,) = s.runs("i1"), s.runs("i2")
        assert (first.head.epoch, second.head.epoch) == (1, 2)
        assert (first.head.follow, second.head.follow) == (False, True)
        assert second.head.delivered == 10
        await until(first.cancelled.is_set)
        assert await s.moved() == 1
        (timeline,) = [line[2:] for line in text.split("\n") if line.startswith(": timeline ")]
        when = {span.name: span.at for span in parse_comment(timeline)}
        assert when["tokens"] < when["move"]


async def test_an_answer_that_is_not_streamed_moves_too(nats: Nats) -> None:
    async with scene(nats) as s:
        await s.deploy()
        s.pace["i1"], s.pace["i2"] = 10, TOTAL
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}, timeout=60))
        await until(lambda: s.acked("i1") >= 20)
        await s.deploy(moves=True)
        assert (await call).json() == list(range(TOTAL))
        assert await s.moved() == 1


async def test_rounds_until_little_is_missing(nats: Nats) -> None:
    """The source goes on while the destination computes: what it lacks then is told in the next round."""
    async with scene(nats) as s, s.reading() as call:
        held = s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        s.pace["i1"] = 16
        await until(lambda: s.acked("i1") >= 32)
        held.set()
        await until(lambda: len(s.runs("i2")) == 2)
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert [len(run.head.recorded[0]) for run in s.runs("i2")] == [10, 16]
        await until(s.runs("i2")[0].cancelled.is_set)


async def test_a_running_call_is_fed_what_is_missing(nats: Nats) -> None:
    """Where the destination takes that, no call is opened twice."""
    async with scene(nats) as s, s.reading() as call:
        second = await s.first_feed()
        assert second.fed[0] == Feed(second.head.call, 2, 0, 10, tuple(number * 7 for number in range(10, 16)))
        await until(s.runs("i1")[0].cancelled.is_set)
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert len(s.runs("i2")) == 1
        assert await s.moved() == 1


async def test_what_the_source_tells_meanwhile_is_fed_as_it_comes(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.stands = "i2"
        second = await s.first_feed()
        s.pace["i1"] = 18
        await until(lambda: fed(second) == 18)
        assert second.fed[0].first == 10
        assert all(item.first >= 16 for item in second.fed[1:])
        s.stands, s.pace["i2"] = "", TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 1


async def test_one_that_rests_goes_on_when_its_source_has_stopped(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "QUIET_S", 1e9)
    async with scene(nats) as s, s.reading() as call:
        second = await s.to_one_that_rests()
        assert (second.head.held, second.fed) == (True, [])
        assert not s.runs("i1")[0].cancelled.is_set()
        s.pace["i1"] = 11
        await until(s.runs("i1")[0].cancelled.is_set)
        assert values((await call).text) == list(range(TOTAL))
        assert second.fed == [Feed(second.head.call, 2, 0, 10, (70,))]
        assert second.outbox.next_index == 10 + 2 * 10 + 1, "no output twice"
        assert await s.moved() == 1


async def test_its_source_stops_first_where_it_can(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "STOP_S", 1e9)
    monkeypatch.setattr(moving, "QUIET_S", 1e9)
    async with scene(nats, holds=True) as s, s.reading() as call:
        second = await s.to_one_that_rests()
        (first,) = s.runs("i1")
        s.last, s.pace["i1"] = 11, 11
        await until(lambda: first.held)
        assert not first.cancelled.is_set()
        s.pace["i1"] = 12
        await until(first.cancelled.is_set)
        assert values((await call).text) == list(range(TOTAL))
        assert second.outbox.next_index == 10 + 2 * 10 + 1, "no output twice"
        assert [(item.first, item.held) for item in second.fed][-1:] == [(11, False)]
        assert await s.moved() == 1


@pytest.mark.parametrize("ends", [False, True])
async def test_sources_stop_together(nats: Nats, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Nobody waits for one that ends meanwhile."""
    monkeypatch.setattr(moving, "STOP_S", 1e9)
    monkeypatch.setattr(moving, "QUIET_S", 1e9)
    monkeypatch.setattr(moving, "TOGETHER_S", 1e9)
    async with scene(nats, holds=True) as s, s.reading() as call:
        other = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=SSE, timeout=60))
        await until(lambda: [run.outbox.acked for run in s.runs("i1")] == [20, 20])
        s.rests, s.pace["i2"] = True, TOTAL
        await s.deploy(moves=True)
        await until(lambda: [run.outbox.acked for run in s.runs("i2")] == [10, 10])
        first, second = s.runs("i1")
        s.last, s.pace["i1"] = 11, 11
        await until(lambda: first.held and second.held)
        if ends:
            other.cancel()
            await until(second.cancelled.is_set)
        s.pace["i1"] = 12
        await until(lambda: first.cancelled.is_set() and second.cancelled.is_set())
        assert values((await call).text) == list(range(TOTAL))
        if not ends:
            assert values((await other).text) == list(range(TOTAL))
        assert await s.moved() == (1 if ends else 2)


async def test_its_source_stops_and_says_nothing_more(nats: Nats) -> None:
    async with scene(nats, holds=True) as s, s.reading() as call:
        await s.to_one_that_rests()
        s.pace["i1"] = 11
        await until(s.runs("i1")[0].cancelled.is_set)
        assert s.runs("i1")[0].held
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 1


async def test_the_destination_dies_when_the_source_has_stopped(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "STOP_S", 1e9)
    monkeypatch.setattr(moving, "QUIET_S", 1e9)
    async with scene(nats, holds=True) as s, s.reading() as call:
        second = await s.to_one_that_rests()
        (first,) = s.runs("i1")
        s.pace["i1"] = 11
        await until(lambda: first.held)
        await s.deploy()
        second.end(InstanceLost("i2 died"))
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert not first.held
        assert [(item.ids, item.held) for item in first.fed] == [((), False)] * len(first.fed)
        assert await s.moved() == 0


async def test_a_call_of_which_no_id_is_known_is_not_held(nats: Nats) -> None:
    """It stands where it runs, and tells its ids in groups: the destination draws them all again."""
    async with scene(nats) as s:
        s.ids = False
        async with s.reading() as call:
            s.rests, s.pace["i2"] = True, TOTAL
            s.w.node.judge = lambda _: Opened(status="accepted", feeds=True, holds=True)
            await s.deploy(moves=True)
            assert values((await call).text) == list(range(TOTAL))
            assert not s.runs("i2")[0].head.held
            assert await s.moved() == 1


async def test_that_it_may_draw_is_said_until_it_does(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.deaf = 2
        second = await s.to_one_that_rests()
        assert values((await call).text) == list(range(TOTAL))
        assert len(second.fed) == 3
        assert await s.moved() == 1


async def test_the_source_dies_and_one_that_rests_draws(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "QUIET_S", 1e9)
    async with scene(nats) as s, s.reading() as call:
        second = await s.to_one_that_rests()
        s.dies_at["i1"], s.pace["i1"] = 10, 11
        assert values((await call).text) == list(range(TOTAL))
        assert [item.held for item in second.fed] == [False]
        assert len(s.runs("i2")) == 1


async def test_calls_that_move_together_go_over_together(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its destination has computed stays where it is while that prefills the other."""
    monkeypatch.setattr(moving, "TOGETHER_S", 1e9)
    async with scene(nats) as s, s.reading() as call:
        other = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=SSE, timeout=60))
        await until(lambda: [run.outbox.acked for run in s.runs("i1")] == [20, 20])
        first, second = (run.head.call for run in s.runs("i1"))
        held = s.held = asyncio.Event()
        s.holds = lambda run: (run.head.call, run.head.epoch) == (second, 2)
        s.w.node.judge = lambda _: Opened(status="accepted", feeds=True)
        await s.deploy(moves=True)
        running = s.w.gateway.calls.get(first)
        assert running is not None
        await until(lambda: running.move is not None and running.move.ready)
        assert running.move is not None
        assert not running.move.switched
        s.pace["i1"] = 12
        await until(lambda: running.resumption is not None and len(running.resumption.known(0)) == 12)
        held.set()
        await until(lambda: all(run.cancelled.is_set() for run in s.runs("i1")))
        s.pace["i2"] = TOTAL
        assert [values(response.text) for response in (await call, await other)] == [list(range(TOTAL))] * 2
        assert await s.moved() == 2


async def test_the_source_dies_and_the_destination_is_fed_the_rest(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        held = s.held = asyncio.Event()
        s.w.node.judge = lambda _: Opened(status="accepted", feeds=True)
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        (second,) = s.runs("i2")
        running = s.w.gateway.calls.get(second.head.call)
        assert running is not None
        await until(lambda: running.move is not None and running.move.feeds)
        s.dies_at["i1"], s.pace["i1"] = 12, 13
        await until(lambda: fed(second) == 12)
        s.pace["i2"] = TOTAL
        held.set()
        assert values((await call).text) == list(range(TOTAL))
        assert len(s.runs("i2")) == 1


async def test_new_calls_go_to_the_destination(nats: Nats) -> None:
    async with scene(nats) as s:
        s.pace["i1"], s.pace["i2"] = 0, TOTAL
        await s.deploy(moves=True)
        assert (await s.w.http.post("/fn/draw", json={}, timeout=60)).json() == list(range(TOTAL))
        assert not s.runs("i1")


# --- what goes wrong --------------------------------------------------------------------------------
async def test_it_ends_at_the_source_in_the_middle(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        await until(s.runs("i2")[0].cancelled.is_set)
        assert await s.moved() == 0


async def test_its_caller_goes_away_in_the_middle(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        call.cancel()
        await until(s.runs("i1")[0].cancelled.is_set)
        await until(s.runs("i2")[0].cancelled.is_set)
        await until(lambda: len(s.w.gateway.calls) == 0)


@pytest.mark.parametrize("answer", ["busy", "gone"])
async def test_the_destination_does_not_take_it_at_once(nats: Nats, answer: Any) -> None:
    async with scene(nats) as s, s.reading() as call:
        refused: list[Open] = []

        def judge(request: Open) -> Opened:
            if request.head.instance == "i2" and len(refused) < 2:
                refused.append(request)
                return Opened(status=answer)
            return Opened(status="accepted")

        s.w.node.judge = judge
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        assert values((await call).text) == list(range(TOTAL))
        assert len(refused) == 2
        assert await s.moved() == 1


async def test_the_destination_dies_and_the_source_goes_on(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.dies_at["i2"] = 3
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2") and s.runs("i2")[0].outbox.done)
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 0


async def test_the_destination_falls_silent_and_the_source_goes_on(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1.5)
    async with scene(nats) as s, s.reading() as call:
        s.w.node.mute = lambda item: item.epoch > 1
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2") and s.runs("i2")[0].cancelled.is_set())
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 0


async def test_it_falls_silent_when_it_has_the_call(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1.5)
    async with scene(nats) as s, s.reading() as call:
        await s.deploy(moves=True)
        await until(s.runs("i1")[0].cancelled.is_set)
        s.w.node.mute = lambda item: item.epoch == 2
        await s.deploy()
        s.pace["i1"] = s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert max(run.head.epoch for run in s.w.node.runs.values()) > 2


async def test_the_source_dies_and_the_destination_goes_on_at_once(nats: Nats) -> None:
    """Also where it has not computed yet what it was told."""
    async with scene(nats) as s, s.reading() as call:
        held = s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        s.dies_at["i1"], s.pace["i1"] = 12, 13
        await until(lambda: s.runs("i1")[0].outbox.done)
        s.pace["i2"] = TOTAL
        held.set()
        assert values((await call).text) == list(range(TOTAL))
        assert len(s.runs("i2")) == 1
        text = (await s.w.http.get("/metrics")).text
        assert 'sllm_calls_resumed_total{function="draw"} 1.0' in text


async def test_a_destination_that_draws_other_ids_is_not_used(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.drawn = lambda run, number: number * 7 + (run.head.instance == "i2")
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2") and s.runs("i2")[0].cancelled.is_set())
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert len(s.runs("i2")) == 1
        assert await s.moved() == 0


async def test_where_no_ids_are_kept_outputs_are_compared(nats: Nats) -> None:
    """As where log probabilities are asked for: the destination draws all of it again."""
    async with scene(nats) as s:
        s.ids = False
        async with s.reading() as call:
            s.pace["i2"] = TOTAL
            await s.deploy(moves=True)
            assert values((await call).text) == list(range(TOTAL))
            assert await s.moved() == 1


async def test_values_in_parts(nats: Nats) -> None:
    async with scene(nats) as s:
        s.value = lambda _, number: str(number) * (2 * MAX_PART)
        s.total, s.pace["i1"], s.pace["i2"] = 4, 2, 4
        await s.deploy()
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}, timeout=60))
        await until(lambda: s.acked("i1") >= 4)
        await s.deploy(moves=True)
        assert json.loads((await call).text) == [str(number) * (2 * MAX_PART) for number in range(4)]
        assert await s.moved() == 1


async def test_a_destination_of_another_numerics_class_is_not_asked(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        source, other = entry("i1", fingerprint="f", moves_to="i2"), entry("i2", fingerprint="g")
        await s.w.deploy(engine("draw"), source, other, script=s.draw)
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert not s.runs("i2")
