"""A call that moves to another instance while it runs."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Final

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg

from sllm_gateway import link, moves, queue, tempo
from sllm_gateway import move as moving
from sllm_gateway.binding import Binding
from sllm_gateway.call import Call
from sllm_gateway.link import Link
from sllm_gateway.move import BEHIND, IN_STEP, NEAR, PATIENT, ROUNDS, TOGETHER_S, Move, Stage
from sllm_gateway.pace import Pace
from sllm_gateway.resumption import Resumption
from sllm_gateway.tempo import MESSAGES_S, OVERTAKES, PATIENCE, QUICK, QUIET_S, SLOWER, STOP_S
from sllm_gateway.timers import TICK_S
from sllm_gateway.under_way import Next, going, together
from sllm_runtime.platform import trace
from sllm_runtime.protocol import codec, limits, subjects
from sllm_runtime.protocol.errors import Cancelled, DeadlineExceeded, InstanceLost, NotDeterministic
from sllm_runtime.protocol.frames import End, Feed, Frame, FrameKind, Ids, Open, Opened, Unknown
from sllm_runtime.protocol.limits import FEED_IDS, MAX_PART, WINDOW
from sllm_runtime.protocol.node import InstanceStatus
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import parse_comment
from tests.fixtures.nats import NODE, NODE_2, Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, ScriptedNode, World, entry, world
from tests.unit.gateway.test_faults import SSE, values
from tests.unit.gateway.test_resumption import engine

# --- what is new to the caller ----------------------------------------------------------------------
NOW = 16.0
NEVER: Final = 1e9
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


def move_of(kept: Resumption) -> Move:
    return Move(Binding("call", 2, entry("i2"), b"", 1 << 20, NOW), kept)


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
        if move.computed and not move.half and (not rest or not there or chance.random() < 0.5):
            arrive(move.switch(NOW)[0])
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


@given(steps, st.integers(0, 2**32), st.booleans())
def test_one_that_rests_goes_on_with_the_same(answer: list[Step], seed: int, beside: bool) -> None:
    """Whenever it is told what: it goes over, and before that its caller has nothing of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempo, "QUICK", 1e-9 if beside else NEVER)
        _goes_on_with_the_same(answer, random.Random(seed))


def _goes_on_with_the_same(answer: list[Step], chance: random.Random) -> None:
    now, kept, caller = NOW, Resumption(), list[Frame]()
    source = frames_of(answer)

    def arrive(frames: list[Frame]) -> None:
        kept.take(frames)
        caller.extend(frames)

    told = len(frames_of(answer, upto=chance.randint(1, len(answer))))
    arrive(source[:told])
    kept.watch()
    move, there, rest = move_of(kept), Resting(answer, kept), source[told:-1]
    move.opened(True, now)
    for _ in range(1000):
        count, now = chance.randint(0, 3), now + QUIET_S / 4
        heard, rest = rest[:count], rest[count:]
        arrive(heard)
        if move.stage is Stage.HANDED and not kept.half and chance.random() < 0.3:
            heard, rest = [*heard, RESTS], []
        move.heard(heard, now)
        assert move.take(there.say(chance.randint(0, 5)), now)[0] == []
        if going([move], now):
            arrive(move.switch(now)[0])
            there.hear(move.let_draw())
            break
        do_next(move, there, now)
    assert move.switched
    assert there.let
    while frames := there.say(chance.randint(1, 3)):
        arrive(move.take(frames, now)[0])
    assert move.over
    assert given_out(caller) == given_out(source)
    assert caller[-1].kind is FrameKind.END
    assert kept.recorded == recorded(source)


def do_next(move: Move, there: Resting, now: float) -> None:
    if move.stuck(now):
        there.hear(move.let_draw())
    if move.hopeless(now):
        move.hand(now)
    match together([move], now):
        case Next.FEED, [_]:
            there.hear(move.feed(now))
        case Next.BESIDE, [_]:
            there.hear(move.let_draw())
            move.beside(now)
            assert move.slower() > 0.0
        case Next.HAND, [_]:
            move.hand(now)


def recorded(frames: list[Frame]) -> tuple[tuple[int, ...], ...]:
    right = Resumption()
    right.take(frames)
    return right.recorded


RESTS: Final = Frame(0, FrameKind.IDS, codec.pack(Ids(0, 0, ())))
SINGLE: list[Step] = [(0, (number,), [b"x"]) for number in range(80)]


class Pair:
    """A source that has told ``upto`` steps of ``answer``, and a destination that was opened with them and rests."""

    def __init__(self, answer: list[Step] = SINGLE, upto: int = 4, *, rests: bool = True) -> None:
        self.answer, self.drawn, self.said, self.opened_with = answer, upto, 0, upto
        self.now = NOW
        self.kept = Resumption()
        self.kept.take(frames_of(answer, upto=upto))
        self.kept.watch()
        self.move = move_of(self.kept)
        self.move.opened(rests, NOW)

    def draw(self, steps: int = 1, now: float = NOW) -> None:
        """The source tells so many more."""
        before = len(frames_of(self.answer, upto=self.drawn))
        self.drawn += steps
        frames = frames_of(self.answer, upto=self.drawn)[before:]
        self.kept.take(frames)
        self.move.heard(frames, now)

    def say(self, upto: int, now: float = NOW) -> None:
        """The destination has computed the first ``upto`` steps."""
        frames = frames_of(self.answer, delivered=self.opened_with, upto=upto)
        assert self.move.take(frames[self.said :], now)[0] == []
        self.said = len(frames)

    def next(self, now: float = NOW) -> Next:
        return together([self.move], now)[0]

    def keep_up(self, rounds: int = IN_STEP) -> None:
        """It has computed what it was opened with, and then each token as it came."""
        self.say(self.drawn)
        for _ in range(rounds):
            self.draw()
            assert self.next() is Next.FEED
            self.move.feed(NOW)
            self.say(self.drawn)

    def rest(self, now: float = NOW) -> None:
        """The source says that it draws no more."""
        self.kept.take([RESTS])
        self.move.heard([RESTS], now)

    def go_over(self, now: float = NOW) -> list[Feed]:
        assert going([self.move], now) == [self.move]
        assert self.move.switch(now)[0] == []
        return self.move.let_draw()


def test_it_is_fed_when_a_step_of_its_source_has_ended() -> None:
    """And it has computed what it was told before: it has one step of what came meanwhile."""
    pair = Pair()
    pair.draw(8)
    assert (pair.move.stage, pair.move.filling, pair.next()) == (Stage.OPENED, True, Next.WAIT)
    pair.say(4)
    assert (pair.move.stage, pair.move.filling, pair.next()) == (Stage.FOLLOWS, False, Next.WAIT)
    pair.draw()
    assert pair.next() is Next.FEED
    assert pair.move.feed(NOW) == [Feed("call", 2, 0, 4, tuple(range(4, 13)), True)]
    pair.draw()
    assert (pair.move.computed, pair.next()) == (False, Next.WAIT)
    pair.say(13)
    assert (pair.move.computed, pair.next()) == (True, Next.WAIT)
    pair.draw()
    assert pair.next() is Next.FEED
    assert pair.move.feed(NOW) == [Feed("call", 2, 0, 13, (13, 14), True)]


@pytest.mark.parametrize("missing", range(1, NEAR + 1))
@pytest.mark.parametrize("last", [0, 1])
def test_the_source_of_one_that_keeps_up_ends_its_step_and_the_destination_draws(missing: int, last: int) -> None:
    """By the message that brings what is missing."""
    pair = Pair()
    pair.keep_up()
    pair.draw(missing)
    assert (pair.move.gap, pair.next()) == (missing, Next.HAND)
    pair.move.hand(NOW)
    pair.draw(last)
    assert (going([pair.move], NOW), pair.next(), pair.move.resting) == ([], Next.WAIT, True)
    pair.rest()
    first = 4 + IN_STEP
    assert pair.go_over() == [Feed("call", 2, 0, first, tuple(range(first, first + missing + last)))]
    assert (pair.move.stage, pair.move.resting, pair.move.level) == (Stage.OVER, False, False)
    new, _ = pair.move.take(frames_of(SINGLE, delivered=4, upto=pair.drawn)[pair.said :], NOW)
    assert (new, pair.move.level, pair.move.over) == ([], True, False), "nobody knows that it has heard"
    said = len(frames_of(SINGLE, delivered=4, upto=pair.drawn))
    new, _ = pair.move.take(frames_of(SINGLE, delivered=4, upto=pair.drawn + 1)[said:], NOW)
    assert [frame.kind for frame in new] == [FrameKind.IDS, FrameKind.OUTPUT]
    assert pair.move.over


def test_one_that_has_been_fed_much_is_not_let_draw_yet() -> None:
    pair = Pair()
    pair.say(4)
    pair.draw(NEAR + 1)
    pair.move.feed(NOW)
    pair.say(4 + NEAR + 1)
    pair.keep_up(IN_STEP - 1)
    pair.draw()
    assert pair.next() is Next.FEED
    pair.move.feed(NOW)
    pair.say(pair.drawn)
    pair.draw()
    assert pair.next() is Next.HAND


def test_one_that_is_slower_is_let_draw_in_the_end() -> None:
    pair = Pair()
    pair.say(4)
    for _ in range(ROUNDS):
        pair.draw(NEAR + 1)
        pair.move.outputs = 1
        assert pair.next() is Next.FEED
        pair.move.feed(NOW)
        pair.answer = [*pair.answer, *((0, (pair.drawn + at,), [b"x"]) for at in range(NEAR + 1))]
        pair.say(pair.drawn)
    pair.draw(NEAR + 1)
    assert pair.next() is Next.HAND


def test_what_the_source_draws_in_a_round_is_near() -> None:
    """No further round would make it less; but a few may."""
    pair, now, interval, rounds = Pair(), NOW, 0.003, 0
    pair.answer = [(0, (at,), [b"x"]) for at in range(100)]
    pair.say(pair.drawn)
    while True:
        for _ in range(4):
            now += interval
            pair.draw(now=now)
        if (what := pair.next(now)) is not Next.FEED:
            break
        pair.move.feed(now)
        pair.say(pair.drawn, now + 3.1 * interval)
        rounds += 1
    assert (what, rounds) == (Next.HAND, PATIENT - 1 + IN_STEP)


LASTS: Final = 0.25 * QUICK - MESSAGES_S
"""The longest round that is quick beside outputs of 0.25 s, of which a reserve has one."""


def beside(interval: float = 0.25, takes: float = 1.01 * LASTS) -> Pair:
    """The source draws a token each ``interval``, the destination has one ``takes`` after it is fed."""
    pair, now = Pair(), NOW
    pair.say(pair.drawn)
    for _ in range(IN_STEP):
        now += interval
        pair.draw(now=now)
        assert pair.next(now) is Next.FEED
        pair.move.feed(now)
        pair.say(pair.drawn, now + takes)
    pair.draw(now=now + interval)
    pair.now = now + interval
    return pair


@pytest.mark.parametrize(("takes", "does"), [(0.25, Next.HAND), (0.99 * LASTS, Next.HAND), (1.01 * LASTS, Next.BESIDE)])
def test_where_messages_are_slow_beside_tokens_the_destination_draws_beside_its_source(
    takes: float, does: Next
) -> None:
    assert beside(takes=takes).next(NOW + 1.0) is does


def test_one_that_draws_beside_its_source_goes_over_when_it_is_ahead() -> None:
    pair = beside()
    assert pair.next(pair.now) is Next.BESIDE
    assert pair.move.let_draw() == [Feed("call", 2, 0, 6, (6,))]
    assert pair.move.slower() == 0.0
    pair.move.beside(pair.now)
    assert [pair.move.slower() for _ in range(2)] == [pytest.approx(SLOWER * 0.25), 0.0]
    assert (pair.move.stage, pair.move.resting) == (Stage.BESIDE, False)
    pair.draw(now=pair.now + 9.0)
    pair.say(pair.drawn - 1)
    assert going([pair.move], pair.now) == []
    pair.say(pair.drawn)
    assert going([pair.move], pair.now) == [], "the source may be the next to say something"
    pair.say(pair.drawn + 1)
    assert going([pair.move], pair.now) == [pair.move]
    new, _ = pair.move.switch(pair.now)
    assert {frame.kind for frame in new} == {FrameKind.IDS, FrameKind.OUTPUT}
    assert (pair.move.over, pair.move.let) == (True, True), "it need not be told again"


def test_a_source_that_is_not_overtaken_draws_slower_and_slower() -> None:
    pair = beside()
    pair.move.beside(pair.now)
    told = [pair.move.slower()]
    for drawn in range(1, 2 * PATIENCE):
        pair.draw(now=pair.now + drawn)
        told.append(pair.move.slower())
    assert [at for at, interval in enumerate(told) if interval] == [0, PATIENCE]
    assert told[PATIENCE] == pytest.approx(SLOWER * SLOWER * 0.25), "by what it took before it was slowed"
    pair.draw(now=pair.now + 20.0)
    assert pair.move.slower() == pytest.approx(SLOWER**3 * 0.25)
    pair.move.hand(pair.now)
    assert pair.move.slower() == 0.0


@pytest.mark.parametrize(("missing", "does"), [(BEHIND, Next.BESIDE), (BEHIND + 1, Next.FEED)])
def test_one_that_will_overtake_need_not_be_near(missing: int, does: Next) -> None:
    pair = Pair()
    pair.say(pair.drawn)
    for now in (NOW + 1.0, NOW + 10.0):
        pair.draw(missing, now=now)
        pair.move.outputs = 1
        pair.move.feed(now)
        pair.say(pair.drawn, now + 8.0)
    pair.draw(missing, now=NOW + 20.0)
    assert pair.next(NOW + 20.0) is does


def test_a_token_of_one_that_draws_beside_is_compared() -> None:
    pair = beside()
    pair.move.let_draw()
    pair.move.beside(pair.now)
    pair.draw(now=pair.now)
    with pytest.raises(NotDeterministic):
        pair.move.take([Frame(0, FrameKind.IDS, codec.pack(Ids(0, pair.drawn - 1, (999,))))], pair.now)


@pytest.mark.parametrize(("drawn", "later"), [(OVERTAKES, 0.0), (1, QUIET_S)])
def test_one_that_does_not_overtake_comes_level_with_a_source_that_stops(drawn: int, later: float) -> None:
    pair = beside()
    pair.move.let_draw()
    pair.move.beside(pair.now)
    assert pair.move.slower()
    pair.draw(drawn - 1, now=pair.now)
    assert not pair.move.hopeless(pair.now)
    pair.draw(now=pair.now)
    assert pair.move.hopeless(pair.now + later)
    pair.move.hand(pair.now)
    assert (going([pair.move], pair.now), pair.move.hopeless(pair.now)) == ([], False)
    pair.draw(now=pair.now)
    pair.say(pair.drawn - 1, pair.now)
    pair.rest(pair.now)
    assert pair.go_over(pair.now) == [Feed("call", 2, 0, pair.drawn - 1, (pair.drawn - 1,))], "what it lacks"
    assert not pair.move.level


def test_one_that_is_level_with_a_source_that_stops_is_fed_nothing() -> None:
    pair = beside()
    pair.move.let_draw()
    pair.move.beside(pair.now)
    pair.move.slower()
    pair.draw(OVERTAKES, now=pair.now)
    pair.move.hand(pair.now)
    pair.say(pair.drawn, pair.now)
    assert going([pair.move], pair.now) == [pair.move], "whatever the source has to say"
    pair.move.switch(pair.now)
    assert pair.move.level


def drawing() -> Pair:
    """A destination that draws along and lacks one token; its source is told to stop."""
    pair = Pair(rests=False)
    pair.say(4)
    pair.draw()
    assert pair.next() is Next.HAND
    pair.move.hand(NOW)
    return pair


def test_one_that_draws_along_goes_over_when_it_has_what_the_source_told() -> None:
    """Which may be in a step still, that the caller need not wait for."""
    pair = drawing()
    pair.draw()
    pair.say(pair.drawn - 1)
    pair.rest()
    assert (going([pair.move], NOW), pair.next()) == ([], Next.WAIT)
    pair.say(pair.drawn)
    assert pair.go_over() == []
    assert pair.move.over


def test_one_that_draws_along_may_be_ahead() -> None:
    pair = drawing()
    pair.say(pair.drawn + 1)
    assert going([pair.move], NOW) == [pair.move]
    new, _ = pair.move.switch(NOW)
    assert {frame.kind for frame in new} == {FrameKind.IDS, FrameKind.OUTPUT}
    assert pair.move.over


def test_what_its_source_gave_meanwhile_is_not_given_again() -> None:
    """It was ahead. What is left out takes none of its window."""
    pair = Pair(rests=False)
    pair.say(5)
    pair.draw()
    pair.move.hand(NOW)
    new, dropped = pair.move.switch(NOW)
    (output,) = [frame for frame in frames_of(SINGLE, delivered=4, upto=5) if frame.kind is FrameKind.OUTPUT]
    assert (given_out(new), dropped) == (b"", output.cost)


def test_what_is_here_of_its_next_output_is_given_at_the_switch() -> None:
    pair = Pair(rests=False)
    pair.say(4)
    assert pair.move.take([Frame(0, FrameKind.OUTPUT, b"4", True)], NOW) == ([], 0)
    pair.move.hand(NOW)
    assert pair.move.switch(NOW) == ([Frame(0, FrameKind.OUTPUT, b"4", True)], 0)


def test_what_it_says_that_its_source_has_said_takes_none_of_its_window() -> None:
    pair = Pair()
    pair.draw()
    again = frames_of(SINGLE, delivered=4, upto=5)
    assert {frame.kind for frame in again} == {FrameKind.IDS, FrameKind.OUTPUT}
    assert pair.move.take(again, NOW) == ([], sum(frame.cost for frame in again))


def test_one_that_dies_before_it_draws_ends_as_any_other() -> None:
    """Nothing has come of it, and its source is left: its end is the call's, which is resumed."""
    pair = Pair()
    pair.keep_up()
    pair.move.hand(NOW)
    pair.rest()
    pair.go_over()
    assert not pair.move.over
    died = Frame(0, FrameKind.END, codec.pack(End(error=InstanceLost("it died").body())))
    assert pair.move.take([died], NOW) == ([died], 0)


def test_one_that_is_opened_with_nothing_has_yet_to_prefill() -> None:
    assert move_of(Resumption()).filling


def test_a_token_that_both_draw_is_compared() -> None:
    pair = drawing()
    pair.draw()
    with pytest.raises(NotDeterministic):
        pair.move.take([Frame(0, FrameKind.IDS, codec.pack(Ids(0, pair.drawn - 1, (999,))))], NOW)


@pytest.mark.parametrize("rests", [True, False])
@pytest.mark.parametrize(("before", "waits"), [(0.0, STOP_S), (0.2, 0.4), (2.0, QUIET_S)])
def test_a_source_is_waited_for_so_long(before: float, waits: float, rests: bool) -> None:
    """Twice as long as it was ever silent before: it may be of the version before, which says nothing when it rests."""
    pair = Pair(rests=rests)
    pair.say(4)
    pair.draw()
    now = NOW + before
    pair.move.heard([], now)
    pair.move.hand(now)
    assert [pair.move.goes_over(now + at) for at in (waits - 0.01, waits + 0.01)] == [False, True]


def test_it_does_not_go_over_within_an_output() -> None:
    pair = Pair()
    pair.say(4)
    pair.move.hand(NOW)
    pair.rest()
    assert pair.move.goes_over(NOW), "nothing is missing"
    pair.kept.take([Frame(0, FrameKind.OUTPUT, b"4", True)])
    assert not pair.move.goes_over(NOW + QUIET_S)
    pair.kept.take([Frame(0, FrameKind.OUTPUT, b"4")])
    assert pair.move.goes_over(NOW + QUIET_S)


def test_what_was_said_before_it_was_told_to_stop_does_not_count() -> None:
    """It had been told before, and was let draw again."""
    pair = Pair()
    pair.keep_up()
    pair.rest()
    pair.move.hand(NOW)
    assert not pair.move.goes_over(NOW)


def test_nothing_is_done_within_an_output() -> None:
    pair = Pair()
    pair.say(4)
    pair.kept.take([Frame(0, FrameKind.OUTPUT, b"4", True)])
    assert pair.next(NOW + QUIET_S) is Next.WAIT


@pytest.mark.parametrize("ids", [0, 1])
def test_no_output_of_a_source_that_is_quiet_is_waited_for(ids: int) -> None:
    pair = Pair()
    pair.say(4)
    pair.move.heard([Frame(0, FrameKind.IDS, codec.pack(Ids(0, 4, (4,) * ids)))], NOW + QUIET_S / 2)
    assert [pair.next(NOW + at) for at in (QUIET_S / 2, QUIET_S)] == [Next.WAIT, Next.FEED]


# --- calls that move together -----------------------------------------------------------------------
def both(pairs: list[Pair], now: float = NOW) -> tuple[Next, list[int]]:
    """What is done for which."""
    moves = [pair.move for pair in pairs]
    what, which = together(moves, now)
    return what, [moves.index(move) for move in which]


def test_a_step_has_ended_when_all_have_given_out_what_it_made() -> None:
    """Or one has given out more: the others make none at each step."""
    pairs = [Pair(), Pair()]
    for pair in pairs:
        pair.say(4)
    pairs[0].draw()
    assert both(pairs) == (Next.WAIT, [])
    pairs[1].draw()
    assert both(pairs) == (Next.FEED, [0, 1])
    pairs[1].draw()
    assert both(pairs) == (Next.WAIT, [])
    pairs[1].draw()
    assert both(pairs) == (Next.FEED, [0, 1])


def test_they_are_handed_over_together() -> None:
    pairs = [Pair(), Pair()]
    pairs[0].keep_up()
    pairs[1].keep_up(IN_STEP - 1)
    for what in (Next.FEED, Next.HAND):
        for pair in pairs:
            pair.draw()
        assert both(pairs) == (what, [0, 1])
        for pair in pairs:
            pair.move.feed(NOW)
            pair.say(pair.drawn)


@pytest.mark.parametrize("half", [True, False])
def test_they_go_over_together(half: bool) -> None:
    """Those that rest, as long as none is late, which one within an output may be."""
    pairs = [Pair(), Pair(), Pair(rests=False)]
    moves = [pair.move for pair in pairs]
    for pair in pairs:
        pair.say(4)
        pair.move.hand(NOW)
    if half:
        pairs[1].kept.take([Frame(0, FrameKind.OUTPUT, b"4", True)])
    pairs[0].rest()
    assert going(moves, NOW) == moves[2:]
    late = NOW + STOP_S
    assert going(moves, late) == (moves[::2] if half else moves)
    pairs[1].rest()
    assert going(moves, NOW) == (moves[2:] if half else moves)


@pytest.mark.parametrize("opened", [True, False])
def test_they_wait_for_one_that_is_being_computed(opened: bool) -> None:
    """So long and no longer."""
    pairs = [Pair(), Pair()]
    pairs[0].keep_up()
    if opened:
        pairs[1].keep_up()
        pairs[1].draw()
        pairs[1].move.feed(NOW)
    for at, what in ((NOW + TOGETHER_S - 0.1, (Next.WAIT, [])), (NOW + TOGETHER_S, (Next.HAND, [0]))):
        for pair in pairs:
            pair.draw(now=at)
        assert both(pairs, at) == what
        pairs[0].move.feed(at)
        pairs[0].say(pairs[0].drawn)


def test_one_that_draws_all_again_is_waited_for_by_nobody() -> None:
    """A token a step, which costs the others little."""
    other = Resumption()
    other.take([Frame(0, FrameKind.OUTPUT, b"x")])
    other.watch()
    pair, drawing = Pair(), move_of(other)
    drawing.opened(False, NOW)
    assert (drawing.computed, drawing.filling) == (False, False)
    pair.keep_up()
    pair.draw(2)
    assert together([pair.move, drawing], NOW) == (Next.HAND, [pair.move])


def test_those_that_rest_do_not_wait_for_one_that_draws_along() -> None:
    pairs = [Pair(), Pair(rests=False)]
    pairs[0].keep_up()
    pairs[1].say(4)
    pairs[1].draw(NEAR)
    for pair in pairs:
        pair.draw()
    assert both(pairs) == (Next.HAND, [0])


def test_those_that_rest_go_over_without_one_that_draws_along() -> None:
    pairs = [Pair(), Pair(rests=False)]
    for pair in pairs:
        pair.say(4)
    pairs[1].draw()
    for pair in pairs:
        pair.move.hand(NOW)
    pairs[0].rest()
    assert going([pair.move for pair in pairs], NOW) == [pairs[0].move]


def test_one_keeps_up_in_rounds_that_follow_each_other() -> None:
    pair = Pair()
    pair.say(4)
    for missing in (1, NEAR + 1, *[1] * IN_STEP):
        pair.draw(missing)
        assert pair.next() is Next.FEED
        pair.move.feed(NOW)
        pair.say(pair.drawn)
    pair.draw()
    assert pair.next() is Next.HAND


def test_one_that_draws_goes_over_when_it_is_near_or_after_a_while() -> None:
    """It is fed nothing."""
    for missing in (NEAR, NEAR + 1):
        pair = Pair(rests=False)
        pair.say(4)
        pair.draw(missing)
        late = NOW + TOGETHER_S
        found = [together([pair.move], NOW), together([pair.move], late)]
        assert found == [(Next.HAND, [pair.move] if missing == NEAR else []), (Next.HAND, [pair.move])]
        pair.move.hand(NOW)
        assert (pair.move.lacking(), pair.move.let_draw()) == ([], [])


# --- what it is told --------------------------------------------------------------------------------
def test_one_that_rests_and_lacks_outputs_alone_draws() -> None:
    """Its generation is over, and code of the function goes on: no id brings it there."""
    pair = Pair()
    pair.say(4)
    code = [Frame(0, FrameKind.OUTPUT, b"code")] * (NEAR + 1)
    pair.kept.take(code)
    pair.move.heard(code, NOW)
    assert (pair.next(), pair.move.feed(NOW)) == (Next.FEED, [])
    assert [pair.move.stuck(NOW + at) for at in (QUIET_S / 2, QUIET_S)] == [False, True]
    assert pair.move.let_draw() == [Feed("call", 2, 0, 0, ())]
    assert not pair.move.resting
    pair.move.take(code, NOW)
    assert pair.next(NOW + QUIET_S) is Next.HAND


def test_one_that_rests_and_says_nothing_of_a_later_generation_draws() -> None:
    """It runs when an earlier one has ended, of which the source alone knows."""
    pair = Pair()
    pair.say(4)
    pair.kept.take([Frame(0, FrameKind.IDS, codec.pack(Ids(1, 0, (5,))))])
    assert pair.move.feed(NOW) == [Feed("call", 2, 1, 0, (5,), True)]
    assert [pair.move.stuck(NOW + at) for at in (QUIET_S, TOGETHER_S - 1, TOGETHER_S)] == [False, False, True]


def test_one_that_has_not_said_whether_it_rests_is_let_draw() -> None:
    move = move_of(Resumption())
    assert move.let_draw() == [Feed("call", 2, 0, 0, ())]
    move = move_of(Resumption())
    move.opened(False, NOW)
    assert move.let_draw() == []


def test_what_it_says_of_itself_is_waited_for() -> None:
    """Its frames may overtake that."""
    pair = Pair()
    pair.move.rests = None
    pair.say(4)
    pair.draw()
    assert pair.next() is Next.WAIT
    pair.move.opened(True, NOW)
    pair.draw()
    assert (pair.move.stage, pair.next()) == (Stage.FOLLOWS, Next.FEED)


def test_a_round_feeds_what_is_missing_of_each_generation() -> None:
    pair = Pair([(number % 2, (number, number), [b"x"]) for number in range(10)], 2)
    pair.draw(8)
    pair.say(4)
    assert (pair.move.computed, pair.move.gap) == (True, 6)
    fed = [Feed("call", 2, 0, 4, (4, 4, 6, 6, 8, 8), True), Feed("call", 2, 1, 4, (5, 5, 7, 7, 9, 9), True)]
    assert pair.move.feed(NOW) == fed
    assert (pair.move.computed, pair.move.rounds) == (False, 1)
    pair.say(9)
    assert not pair.move.computed
    assert pair.move.lacking() == [Feed("call", 2, 1, 8, (9, 9), True)], "any of these may be lost"
    pair.say(10)
    assert pair.move.computed


def test_ids_are_fed_in_messages_of_a_bounded_size() -> None:
    kept = Resumption()
    move = move_of(kept)
    move.opened(True, NOW)
    ids = tuple(range(2 * FEED_IDS + 1))
    kept.take([Frame(0, FrameKind.IDS, codec.pack(Ids(0, 0, ids)))])
    fed = move.feed(NOW)
    assert [(item.first, len(item.ids)) for item in fed] == [(0, FEED_IDS), (FEED_IDS, FEED_IDS), (2 * FEED_IDS, 1)]
    assert tuple(number for item in fed for number in item.ids) == ids


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
        move.switch(NOW)
    assert not move.switched, "the call stays"


def test_another_id_that_came_first_is_found_at_the_switch() -> None:
    kept = Resumption()
    kept.watch()
    move = move_of(kept)
    move.take(frames_of([(0, (1, 3), [])], upto=1), NOW)
    kept.take(frames_of([(0, (1, 2), [])], upto=1))
    with pytest.raises(NotDeterministic):
        move.switch(NOW)
    assert not move.switched


# --- the whole gateway ------------------------------------------------------------------------------
TOTAL = 20


class Scene:
    """``draw`` on instance i1, and on i2 where it moves to; each draws as many ids as ``pace`` says."""

    def __init__(self, w: World, concurrency: int) -> None:
        self.w = w
        self.concurrency = concurrency
        self.pace: dict[str, int] = defaultdict(int)
        self.total = TOTAL
        self.value: Callable[[Run, int], Any] = lambda _, number: number
        self.drawn: Callable[[Run, int], int] = lambda _, number: number * 7
        self.dies_at: dict[str, int] = {}
        self.ends_at: dict[str, int] = {}
        self.last = -1
        """The id that one is drawing when it is told to draw no more."""
        self.ids = True
        self.held: asyncio.Event | None = None
        """What the first run at i2 waits for before it says a word."""
        self.holds: Callable[[Run], bool] = lambda run: run.head.epoch == 2
        self.rests = False
        """Whether i2 draws nothing of a call that is held, until it was told to ``deaf`` + 1 times."""
        self.deaf = 0

    async def deploy(self, *, moves: bool = False) -> None:
        slots = self.concurrency
        source = entry("i1", fingerprint="f", moves_to="i2" if moves else "", concurrency=slots)
        more = [entry("i2", fingerprint="f", concurrency=slots)] if moves else []
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
            if self.ends_at.get(name) == number:
                break
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
            goes = (may and not stops() and self.pace[run.head.instance] > number) or fed(run) > number
            return goes or run.cancelled.is_set()

        def stops() -> bool:
            return run.held and number > self.last

        await until(lambda: go() or stops())
        if stops():
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, ())))
            run.node.flush(run)
        await until(go)
        return not run.cancelled.is_set()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[asyncio.Task[httpx.Response]]:
        """A call that has begun at i1 and has ten values."""
        await self.deploy()
        self.pace["i1"] = 10
        task = asyncio.create_task(self.w.http.post("/fn/draw", json={}, headers=SSE))
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

    async def to_one_that_rests(self) -> Run:
        """The call moves to a destination that is held, which has what it was told."""
        self.rests, self.pace["i2"] = True, self.total
        await self.deploy(moves=True)
        await until(lambda: self.acked("i2") >= 10 if self.runs("i2") else False)
        (second,) = self.runs("i2")
        return second

    async def to_one_that_keeps_up(self) -> Run:
        """And it is fed what its source draws, a token at a time, until it is let draw with the next one."""
        second = await self.to_one_that_rests()
        await self.keep_up([second])
        return second

    async def to_one_that_draws_beside(self) -> tuple[Run, Run]:
        """And then it is let draw, and its source is slowed: both, at the same token."""
        second = await self.to_one_that_keeps_up()
        (first,) = self.runs("i1")
        self.pace["i2"] = self.pace["i1"] = 11 + IN_STEP
        await until(lambda: first.slowed and any(not item.held for item in second.fed))
        return first, second

    async def keep_up(self, runs: list[Run]) -> None:
        for number in range(11, 11 + IN_STEP):
            self.pace["i1"] = number
            await until(lambda: all(run.outbox.acked >= 2 * number - 10 for run in runs))  # noqa: B023 - awaited here

    def moving(self) -> Call:
        """The one that the source has."""
        (first,) = self.runs("i1")
        call = self.w.gateway.calls.get(first.head.call)
        assert call is not None
        return call

    async def moved(self) -> float:
        text = (await self.w.http.get("/metrics")).text
        lines = [line for line in text.split("\n") if line.startswith("sllm_calls_moved_total{")]
        return float(lines[0].rpartition(" ")[2]) if lines else 0.0


def fed(run: Run) -> int:
    """How many ids it has been told while it ran."""
    return max((item.first + len(item.ids) for item in run.fed), default=0)


TAKES: Final = Opened(status="accepted", holds=True)


@asynccontextmanager
async def scene(
    nats: Nats,
    *,
    quiet_s: float = 0.1,
    stop_s: float = STOP_S,
    quick: float = NEVER,
    reserve_s: float = 0.0,
    concurrency: int = 64,
) -> AsyncIterator[Scene]:
    """``quiet_s``, ``stop_s``, ``quick``, ``reserve_s``: the bounds of the same names; no destination draws beside its
    source, none is opened later for a reserve. ``concurrency``: of each instance."""
    async with world(nats) as w:
        w.node.judge = lambda _: TAKES
        with pytest.MonkeyPatch.context() as patch:
            for module in (moving, tempo):
                patch.setattr(module, "QUIET_S", quiet_s)
            patch.setattr(moves, "RESERVE_S", reserve_s)
            patch.setattr(tempo, "STOP_S", stop_s)
            patch.setattr(tempo, "QUICK", quick)
            patch.setattr(tempo, "lasts", lambda _: 0.0)
            yield Scene(w, concurrency)


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


async def test_calls_of_one_source_are_opened_when_their_readers_have_a_reserve(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them; of one that is not streamed none is waited for."""
    full = list[Pace]()
    monkeypatch.setattr(Pace, "full", lambda self, _: self in full)
    async with scene(nats, reserve_s=NEVER) as s, s.reading() as call:
        others = [asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=each)) for each in (SSE, {})]
        await until(lambda: [run.outbox.acked for run in s.runs("i1")] == [20] * 3)
        made = list[Pace]()
        monkeypatch.setattr(Pace, "expect", lambda self, _: made.append(self))
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        await until(lambda: len(made) == 2)
        for pace in made:
            await asyncio.sleep(4 * TICK_S)
            assert not s.runs("i2")
            full.append(pace)
        assert [values((await each).text) for each in (call, others[0])] == [list(range(TOTAL))] * 2
        assert (await others[1]).json() == list(range(TOTAL))
        assert await s.moved() == 3


async def test_a_reserve_is_waited_for_so_long(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "full", lambda *_: False)
    async with scene(nats, reserve_s=0.2) as s, s.reading() as call:
        s.pace["i2"], began = TOTAL, asyncio.get_running_loop().time()
        await s.deploy(moves=True)
        assert values((await call).text) == list(range(TOTAL))
        assert asyncio.get_running_loop().time() - began >= 0.2
        assert await s.moved() == 1


async def test_one_that_is_not_to_move_any_more_is_not_followed(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its route said so, while it waited for its reserve; nor does one whose source died meanwhile keep what it was
    followed for."""
    monkeypatch.setattr(Pace, "full", lambda *_: False)
    async with scene(nats, reserve_s=NEVER) as s, s.reading() as call:
        moving = s.moving()
        assert moving.resumption is not None
        await s.deploy(moves=True)
        await until(lambda: moving.binding is not None and moving.binding.following)
        assert moving.resumption._trail
        await s.deploy()
        await until(lambda: moving.binding is not None and not moving.binding.following)
        assert not moving.resumption._trail
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 0


async def test_a_reserve_that_was_given_back_is_made_anew(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its destination had no room for it then."""
    monkeypatch.setattr(Pace, "full", lambda *_: False)
    async with scene(nats, reserve_s=NEVER) as s, s.reading() as call:
        moving = s.moving()
        await s.deploy(moves=True)
        await until(lambda: moving.pace is not None)
        made, moving.pace = moving.pace, None
        await until(lambda: moving.pace is not None)
        assert moving.pace is not None
        assert moving.pace is not made
        made = moving.pace
        expected: list[Pace] = []
        monkeypatch.setattr(Pace, "expect", lambda self, _: expected.append(self))
        made.end()
        await until(lambda: made in expected)
        monkeypatch.setattr(Pace, "full", lambda *_: True)
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 1


async def test_what_is_in_reserve_of_a_call_that_is_cancelled_is_not_written(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pace, "full", lambda *_: False)
    async with scene(nats, reserve_s=NEVER) as s, s.reading() as call:
        moving = s.moving()
        await s.deploy(moves=True)
        await until(lambda: moving.pace is not None)
        monkeypatch.setattr(Pace, "release", lambda *_: [])
        s.pace["i1"] = 12
        await until(lambda: moving.held)
        assert s.w.gateway.calls.cancel(moving.id)
        assert [value for value in values((await call).text) if isinstance(value, int)] == list(range(10))


async def test_its_destination_is_asked_within_its_trace(nats: Nats) -> None:
    """In the header of NATS' messages, as its source was."""
    said = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
    heard: list[tuple[str, str | None]] = []

    async def opened(message: Msg) -> None:
        head = codec.unpack(Open, message.data).head
        heard.append((head.instance, (message.headers or {}).get(trace.HEADER)))

    async with scene(nats) as s:
        await (await nats.bus(NODE)).subscribe_raw(subjects.node_open(NODE, "x")[:-1] + "*", opened)
        await s.deploy()
        s.pace["i1"], s.pace["i2"] = 10, TOTAL
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers={trace.HEADER: said}))
        await until(lambda: s.acked("i1") >= 20)
        await s.deploy(moves=True)
        assert (await call).json() == list(range(TOTAL))
        await until(lambda: len(heard) == 2, what="both were seen")
    assert heard == [("i1", said), ("i2", said)]


async def test_an_answer_that_is_not_streamed_moves_too(nats: Nats) -> None:
    async with scene(nats) as s:
        await s.deploy()
        s.pace["i1"], s.pace["i2"] = 10, TOTAL
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}))
        await until(lambda: s.acked("i1") >= 20)
        await s.deploy(moves=True)
        assert (await call).json() == list(range(TOTAL))
        assert await s.moved() == 1
        assert await s.w.told(s.w.node.opened[0].head.call) == [("call.moved", "i2", "from i1 to i2")]


async def test_it_is_fed_until_it_keeps_up_and_goes_over_when_its_source_rests(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER) as s, s.reading() as call:
        second = await s.to_one_that_keeps_up()
        assert second.head.held
        assert [(item.first, item.ids, item.held) for item in second.fed] == [
            (number, (7 * number,), True) for number in range(10, 10 + IN_STEP)
        ]
        (first,) = s.runs("i1")
        s.last = s.pace["i1"] = 11 + IN_STEP
        await until(lambda: first.held and first.outbox.acked == 2 * s.pace["i1"])
        assert not first.cancelled.is_set()
        assert all(item.held for item in second.fed)
        s.pace["i1"] += 1
        await until(first.cancelled.is_set)
        assert values((await call).text) == list(range(TOTAL))
        assert second.outbox.next_index == 10 + 2 * 10 + 1, "no output twice"
        let = [item for item in second.fed if not item.held]
        last = (7 * (10 + IN_STEP), 7 * (11 + IN_STEP))
        assert let == [Feed(second.head.call, 2, 0, 10 + IN_STEP, last)] * len(let)
        assert await s.moved() == 1


async def test_it_goes_over_though_its_source_tells_nothing_more(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER) as s, s.reading() as call:
        second = await s.to_one_that_keeps_up()
        s.pace["i1"] = 11 + IN_STEP
        assert values((await call).text) == list(range(TOTAL))
        assert second.outbox.next_index == 10 + 2 * 10 + 1, "no output twice"
        assert await s.moved() == 1


async def test_it_goes_over_though_its_source_makes_no_output(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        await s.to_one_that_rests()
        await until(s.runs("i1")[0].cancelled.is_set)
        assert s.runs("i1")[0].held
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 1


@pytest.mark.parametrize("ends", [False, True])
async def test_calls_of_one_source_stop_together(nats: Nats, monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Nobody waits for one that ends meanwhile."""
    monkeypatch.setattr(moving, "TOGETHER_S", NEVER)
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER) as s, s.reading() as call:
        other = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=SSE))
        await until(lambda: [run.outbox.acked for run in s.runs("i1")] == [20, 20])
        s.rests, s.pace["i2"] = True, TOTAL
        await s.deploy(moves=True)
        await until(lambda: [run.outbox.acked for run in s.runs("i2")] == [10, 10])
        await s.keep_up(s.runs("i2"))
        first, second = s.runs("i1")
        if ends:
            other.cancel()
            await until(second.cancelled.is_set)
        s.last, s.pace["i1"] = 11 + IN_STEP, 12 + IN_STEP
        await until(lambda: first.held and second.held is not ends)
        await until(lambda: first.cancelled.is_set() and second.cancelled.is_set())
        assert values((await call).text) == list(range(TOTAL))
        if not ends:
            assert values((await other).text) == list(range(TOTAL))
        assert await s.moved() == (1 if ends else 2)


async def test_the_destination_dies_when_the_source_has_stopped(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER) as s, s.reading() as call:
        second = await s.to_one_that_keeps_up()
        (first,) = s.runs("i1")
        s.last = s.pace["i1"] = 11 + IN_STEP
        await until(lambda: first.held)
        await s.deploy()
        second.end(InstanceLost("i2 died"))
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert not first.held
        assert [(item.ids, item.held) for item in first.fed] == [((), False)] * len(first.fed)
        assert await s.moved() == 0


BESIDE: Final = 1e-9
"""For ``scene``: each destination draws beside its source."""


async def test_one_that_draws_beside_its_source_goes_over_when_it_is_ahead_in_a_call(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, quick=BESIDE) as s, s.reading() as call:
        first, second = await s.to_one_that_draws_beside()
        assert not first.held
        s.pace["i1"] = 16
        await until(lambda: first.outbox.acked == 2 * 16)
        assert not first.cancelled.is_set()
        s.pace["i2"] = TOTAL
        await until(first.cancelled.is_set)
        assert values((await call).text) == list(range(TOTAL))
        assert second.outbox.next_index == 10 + 2 * 10 + 1, "no output twice"
        assert not first.held
        assert await s.moved() == 1


async def test_a_source_that_is_not_overtaken_stops(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempo, "OVERTAKES", 2)
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, quick=BESIDE) as s, s.reading() as call:
        first, second = await s.to_one_that_draws_beside()
        s.last = s.pace["i1"] = 14 + IN_STEP
        await until(lambda: first.held)
        assert not first.cancelled.is_set()
        s.pace["i1"] += 1
        await until(first.cancelled.is_set)
        await until(lambda: fed(second) == s.pace["i1"], what="it computes in one step what it lacks")
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 1


async def test_one_that_draws_beside_its_source_dies(nats: Nats) -> None:
    """The source draws as it did."""
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, quick=BESIDE) as s, s.reading() as call:
        first, second = await s.to_one_that_draws_beside()
        await s.deploy()
        second.end(InstanceLost("i2 died"))
        await until(lambda: not first.slowed)
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 0


async def test_the_source_dies_beside_one_that_draws(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, quick=BESIDE) as s, s.reading() as call:
        first, _ = await s.to_one_that_draws_beside()
        first.end(InstanceLost("i1 died"))
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert len(s.runs("i2")) == 1


async def test_a_call_that_has_just_begun_is_opened_with_its_first_id(nats: Nats) -> None:
    async with scene(nats) as s:
        await s.deploy()
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=SSE))
        await until(lambda: s.runs("i1"))
        await s.deploy(moves=True)
        (first,) = s.runs("i1")
        await until(lambda: s.w.gateway.calls.get(first.head.call).binding.following)  # type: ignore[union-attr]
        assert not s.runs("i2")
        s.rests, s.pace["i1"], s.pace["i2"] = True, 1, TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert s.runs("i2")[0].head.held
        assert await s.moved() == 1


async def test_a_call_of_which_no_id_is_known_is_not_held(nats: Nats) -> None:
    """It stands where it runs, and tells its ids in groups: the destination draws them all again."""
    async with scene(nats) as s:
        s.ids = False
        async with s.reading() as call:
            s.rests, s.pace["i2"] = True, TOTAL
            await s.deploy(moves=True)
            assert values((await call).text) == list(range(TOTAL))
            assert not s.runs("i2")[0].head.held
            assert await s.moved() == 1


async def test_that_it_may_draw_is_said_until_it_does(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.deaf = 2
        second = await s.to_one_that_rests()
        assert values((await call).text) == list(range(TOTAL))
        assert sum(not item.held for item in second.fed) == 3
        assert await s.moved() == 1


async def test_the_source_dies_and_one_that_rests_draws(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER) as s, s.reading() as call:
        second = await s.to_one_that_rests()
        s.dies_at["i1"], s.pace["i1"] = 11, 11
        assert values((await call).text) == list(range(TOTAL))
        assert [item.held for item in second.fed] in ([True, False], [False])
        assert len(s.runs("i2")) == 1


async def test_one_that_its_destination_has_computed_waits_while_that_prefills_another(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "TOGETHER_S", NEVER)
    async with scene(nats) as s, s.reading() as call:
        other = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=SSE))
        await until(lambda: [run.outbox.acked for run in s.runs("i1")] == [20, 20])
        first, second = (run.head.call for run in s.runs("i1"))
        held = s.held = asyncio.Event()
        s.holds = lambda run: (run.head.call, run.head.epoch) == (second, 2)
        await s.deploy(moves=True)
        running = s.w.gateway.calls.get(first)
        assert running is not None
        await until(lambda: running.move is not None and running.move.stage is Stage.FOLLOWS)
        s.pace["i1"] = 12
        await until(lambda: running.resumption is not None and len(running.resumption.known(0)) == 12)
        assert running.move is not None
        assert running.move.stage is Stage.FOLLOWS
        held.set()
        await until(lambda: all(run.cancelled.is_set() for run in s.runs("i1")))
        s.pace["i2"] = TOTAL
        assert [values(response.text) for response in (await call, await other)] == [list(range(TOTAL))] * 2
        assert await s.moved() == 2


async def test_the_source_dies_and_the_destination_is_fed_the_rest(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        held = s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        (second,) = s.runs("i2")
        running = s.w.gateway.calls.get(second.head.call)
        assert running is not None
        await until(lambda: running.move is not None and running.move.rests)
        s.dies_at["i1"], s.pace["i1"] = 12, 13
        await until(lambda: fed(second) == 12)
        s.pace["i2"] = TOTAL
        held.set()
        assert values((await call).text) == list(range(TOTAL))
        assert len(s.runs("i2")) == 1


async def test_one_that_cannot_be_held_draws_along(nats: Nats) -> None:
    """As an instance of an earlier version: it goes over when it is near."""
    async with scene(nats) as s, s.reading() as call:
        s.w.node.judge = lambda _: Opened(status="accepted")
        s.pace["i1"], s.pace["i2"] = 13, 12
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2") and s.runs("i1")[0].cancelled.is_set())
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert s.runs("i2")[0].fed == []
        assert await s.moved() == 1


async def test_new_calls_go_to_the_destination(nats: Nats) -> None:
    async with scene(nats) as s:
        s.pace["i1"], s.pace["i2"] = 0, TOTAL
        await s.deploy(moves=True)
        assert (await s.w.http.post("/fn/draw", json={})).json() == list(range(TOTAL))
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


async def test_its_deadline_is_over_in_the_middle(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        running = s.moving()
        running.order = replace(running.order, accepted=running.order.accepted - running.version.manifest.timeout)
        running.due = 0.0
        assert '"code":"deadline_exceeded"' in (await call).text
        for instance in ("i1", "i2"):
            await until(s.runs(instance)[0].cancelled.is_set)
        assert await s.moved() == 0


async def test_ids_that_are_lost_are_told_again_once_nats_is_back(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(nats, quiet_s=GIVE_UP_S) as s, s.reading() as call:
        second = await s.to_one_that_rests()
        kept = s.moving().resumption
        assert kept is not None
        with monkeypatch.context() as lossy:
            lossy.setattr(Link, "send_all", lambda *_: None)
            lossy.setattr(Link, "send", lambda *_: None)
            s.pace["i1"] = 12
            await until(lambda: len(kept.known(0)) == 12)
        told = list[Any]()
        monkeypatch.setattr(Link, "send_all", lambda _, __, items: told.extend(items))
        s.w.gateway.calls._delivery.on_reconnect()
        monkeypatch.undo()
        assert [(item.first, len(item.ids), item.held) for item in told if isinstance(item, Feed)] == [(10, 2, True)]
        s.w.gateway.calls._delivery.on_reconnect()
        await until(lambda: fed(second) == 12)
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))


async def test_a_destination_is_asked_for_none_that_has_ended_while_nats_was_away(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its cancellation was sent to nobody: it would begin the call, and have a slot less until that is a stray."""
    away, looked, over = False, asyncio.Event(), asyncio.Event()
    stands, ask = link._Way.stands, Link.open

    def seen(self: link._Way, now: float) -> bool:
        if away:
            looked.set()
        return not away and stands(self, now)

    async def noted(self: Link, node: str, request: Open, *before: Any) -> Opened:
        try:
            return await ask(self, node, request, *before)
        finally:
            if request.head.instance == "i2":
                over.set()

    monkeypatch.setattr(link._Way, "stands", seen)
    monkeypatch.setattr(Link, "open", noted)
    async with scene(nats) as s, s.reading() as call, asyncio.timeout(GIVE_UP_S):
        away = True
        await s.deploy(moves=True)
        await looked.wait()
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        away = False
        await over.wait()
        assert [request.head.instance for request in s.w.node.opened] == ["i1"]


@pytest.mark.parametrize("answer", ["busy", "gone"])
async def test_the_destination_does_not_take_it_at_once(nats: Nats, answer: Any) -> None:
    async with scene(nats) as s, s.reading() as call:
        refused: list[Open] = []

        def judge(request: Open) -> Opened:
            if request.head.instance == "i2" and len(refused) < 2:
                refused.append(request)
                return Opened(status=answer)
            return TAKES

        s.w.node.judge = judge
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        assert values((await call).text) == list(range(TOTAL))
        assert len(refused) == 2
        assert await s.moved() == 1


async def test_one_whose_answer_is_lost_draws_along(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the call, as its frames say; whether it rests is not known."""
    ask = Link.open

    async def lost(self: Link, node: str, request: Open, *before: Any) -> Opened:
        opened = await ask(self, node, request, *before)
        if request.head.instance == "i2":
            await until(lambda: s.acked("i2"))
            raise DeadlineExceeded("no answer")
        return opened

    monkeypatch.setattr(Link, "open", lost)
    async with scene(nats) as s, s.reading() as call, asyncio.timeout(GIVE_UP_S):
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 1


async def test_a_call_that_its_source_has_not_taken_yet_is_not_moved(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be refused there, and go back to the queue."""
    ask, answers = Link.open, asyncio.Event()

    async def late(self: Link, node: str, request: Open, *before: Any) -> Opened:
        opened = await ask(self, node, request, *before)
        if request.head.instance == "i1":
            await answers.wait()
        return opened

    monkeypatch.setattr(Link, "open", late)
    monkeypatch.setattr(moves, "FIRST_S", 0.0)
    async with scene(nats) as s:
        await s.deploy()
        s.w.node.mute = lambda _: not answers.is_set()
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}))
        await until(lambda: s.runs("i1"))
        await s.deploy(moves=True)
        await until(lambda: s.w.gateway.calls._moves._leaving)
        await asyncio.sleep(4 * TICK_S)
        assert not s.runs("i2")
        answers.set()
        s.pace["i1"] = s.pace["i2"] = TOTAL
        assert (await call).json() == list(range(TOTAL))


async def test_who_waits_does_not_get_the_slot_of_a_call_that_is_to_move(nats: Nats) -> None:
    async with scene(nats, concurrency=1) as s, s.reading() as call:
        waits = asyncio.create_task(s.w.http.post("/fn/draw", json={}))
        await until(lambda: s.w.gateway.calls.dispatcher.waiting("draw") == 1)
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        assert values((await call).text) == list(range(TOTAL))
        assert (await waits).json() == list(range(TOTAL))
        first, second = s.runs("i2")
        assert (first.head.call, first.head.epoch) == (s.runs("i1")[0].head.call, 2)
        assert second.head.epoch == 1
        assert await s.moved() == 1


async def test_one_that_stays_reserves_nothing(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, concurrency=1) as s, s.reading() as call:
        _, second = await ahead_with_another_output(s)
        s.pace["i1"] = 13
        await until(second.cancelled.is_set)
        s.pace["i2"] = TOTAL
        assert (await s.w.http.post("/fn/draw", json={})).json() == list(range(TOTAL))
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))


async def test_a_destination_that_is_full_is_left_alone_until_it_has_room(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "BUSY_FIRST_S", NEVER)
    async with scene(nats) as s, s.reading() as call:
        asked: list[Open] = []

        def judge(request: Open) -> Opened:
            asked.append(request)
            return Opened(status="busy") if len(asked) == 1 else TAKES

        s.w.node.judge = judge
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        await until(lambda: asked)
        for number in (11, 12):
            s.pace["i1"] = number
            await until(lambda: s.acked("i1") >= 2 * number)  # noqa: B023 - awaited here
        assert len(asked) == 1
        s.w.node.report(InstanceStatus(instance="i2", function="draw", version=1, state=InstanceState.READY))
        assert values((await call).text) == list(range(TOTAL))
        assert len(asked) == 2
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


async def test_the_node_of_the_destination_leaves_and_the_source_goes_on(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LOST_AFTER_S", 1000.0)

    async def waits(run: Run) -> None:
        await run.cancelled.wait()

    async with scene(nats) as s, s.reading() as call:
        other = ScriptedNode(await nats.bus(NODE_2), NODE_2)
        other.judge, other.scripts["draw"] = lambda _: TAKES, waits
        await other.start()
        source = entry("i1", fingerprint="f", moves_to="i2")
        await s.w.deploy(engine("draw"), source, entry("i2", NODE_2, fingerprint="f"), script=s.draw)
        await until(lambda: (move := s.moving().move) is not None and move.binding.accepted)
        await other.close()
        await until(lambda: s.moving().move is None)
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


@pytest.mark.parametrize("dies", [True, False])
async def test_a_call_stays_for_good_only_where_its_destination_says_something_else(nats: Nats, dies: bool) -> None:
    """One whose destination died goes to the next one."""
    async with scene(nats) as s, s.reading() as call:
        moving = s.moving()
        s.drawn = lambda run, number: number * 7 + (run.head.instance == "i2" and not dies)
        if dies:
            s.dies_at["i2"] = 3
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2") and moving.move is None)
        assert moving.stays is not dies
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))


@pytest.mark.parametrize("ahead", [0, 2])
async def test_what_is_left_out_of_what_its_destination_says_takes_no_credit(nats: Nats, ahead: int) -> None:
    """Ids that it was told, and outputs that it gave out before its source did."""
    async with scene(nats, quiet_s=NEVER if ahead else 0.1) as s, s.reading() as call:
        moving = s.moving()
        s.w.node.judge = lambda _: Opened(status="accepted")
        s.pace["i2"] = 10 + ahead
        await s.deploy(moves=True)
        await until(lambda: s.acked("i2") >= 10 + 2 * ahead if s.runs("i2") else False)
        s.pace["i1"] += ahead
        await until(s.runs("i1")[0].cancelled.is_set)
        s.pace["i2"] = TOTAL - 1
        await until(lambda: s.acked("i2") == 10 + 2 * (TOTAL - 1 - 10) and not moving.buffered)
        assert moving.binding is not None
        inbox = moving.binding.inbox
        assert inbox.consumed_bytes == inbox.received_bytes
        s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))


async def test_the_slot_that_it_leaves_is_free(nats: Nats) -> None:
    async with scene(nats, concurrency=1) as s, s.reading() as call, asyncio.timeout(GIVE_UP_S):
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        assert values((await call).text) == list(range(TOTAL))
        await s.deploy()
        s.pace["i1"] = TOTAL
        assert (await s.w.http.post("/fn/draw", json={})).json() == list(range(TOTAL))
        assert len(s.runs("i1")) == 2


async def test_the_source_dies_before_its_destination_has_taken_the_call(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is resumed as after any other death: that one may refuse it."""
    ask, answers = Link.open, asyncio.Event()

    async def late(self: Link, node: str, request: Open, *before: Any) -> Opened:
        if request.head.epoch == 2:
            await answers.wait()
            return Opened(status="busy")
        return await ask(self, node, request, *before)

    monkeypatch.setattr(Link, "open", late)
    async with scene(nats) as s, s.reading() as call, asyncio.timeout(GIVE_UP_S):
        moving = s.moving()
        s.pace["i2"] = TOTAL
        await s.deploy(moves=True)
        await until(lambda: moving.move is not None)
        s.dies_at["i1"], s.pace["i1"] = 12, 13
        await until(lambda: s.runs("i1")[0].outbox.done)
        await until(lambda: moving.move is None)
        answers.set()
        assert values((await call).text) == list(range(TOTAL))
        assert [run.head.epoch > 2 for run in s.runs("i2")] == [True]


async def test_the_source_dies_in_an_output_that_its_caller_reads(nats: Nats) -> None:
    """No instance can take back the half of it."""
    async with scene(nats) as s, s.reading() as call:
        s.held = asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: (move := s.moving().move) is not None and move.binding.accepted)
        moving, (first,) = s.moving(), s.runs("i1")
        first.outbox.push(FrameKind.OUTPUT, b"[1,", more=True)
        first.node.flush(first)
        await until(lambda: moving.resumption is not None and moving.resumption.half and not moving.frames)
        first.end(InstanceLost("i1 died"))
        await until(s.runs("i2")[0].cancelled.is_set)
        assert '"code":"instance_lost"' in (await call).text


@pytest.mark.parametrize("again_s", [0.0, NEVER])
async def test_a_destination_that_lost_the_call_is_asked_again_after_a_while(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, again_s: float
) -> None:
    monkeypatch.setattr(moves, "AGAIN_S", again_s)
    async with scene(nats) as s, s.reading() as call:
        moving, s.held = s.moving(), asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: moving.move is not None and moving.move.binding.accepted)
        s.w.node.send(Unknown(moving.id, 2))
        await until(s.runs("i2")[0].cancelled.is_set)
        if again_s:
            await asyncio.sleep(4 * TICK_S)
            assert len(s.runs("i2")) == 1
        else:
            await until(lambda: len(s.runs("i2")) == 2)
        s.held.set()
        s.pace["i1"] = s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))


async def test_a_destination_is_not_silent_while_nobody_can_be_heard(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(nats) as s, s.reading() as call:
        moving, s.held = s.moving(), asyncio.Event()
        await s.deploy(moves=True)
        await until(lambda: moving.move is not None and moving.move.binding.accepted)
        with monkeypatch.context() as away:
            away.setattr(Link, "connected", property(lambda _: False))
            away.setattr(limits, "LOST_AFTER_S", 0.0)
            await asyncio.sleep(4 * TICK_S)
            assert moving.move is not None
        s.held.set()
        s.pace["i1"] = s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))


async def test_no_more_calls_are_opened_at_a_destination_than_it_has_slots(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        other = asyncio.create_task(s.w.http.post("/fn/draw", json={}, headers=SSE))
        await until(lambda: [run.outbox.acked for run in s.runs("i1")] == [20] * 2)
        s.held = asyncio.Event()
        source, more = entry("i1", fingerprint="f", moves_to="i2"), entry("i2", fingerprint="f", concurrency=1)
        await s.w.deploy(engine("draw"), source, more, script=s.draw)
        await until(lambda: s.runs("i2"))
        await asyncio.sleep(4 * TICK_S)
        assert len(s.runs("i2")) == 1
        s.held.set()
        s.pace["i1"] = s.pace["i2"] = TOTAL
        assert [values((await each).text) for each in (call, other)] == [list(range(TOTAL))] * 2


async def ahead_with_another_output(s: Scene) -> tuple[Run, Run]:
    """A destination that draws along has given out two outputs that its source, which is at ten, will not."""
    s.w.node.judge = lambda _: Opened(status="accepted")
    s.value = lambda run, number: -number if run.head.epoch == 2 and number >= 10 else number
    s.pace["i2"] = 12
    await s.deploy(moves=True)
    await until(lambda: s.acked("i2") >= 10 + 2 * 2 if s.runs("i2") else False)
    (first,), (second,) = s.runs("i1"), s.runs("i2")
    return first, second


async def test_another_output_found_at_the_switch_leaves_the_call_at_its_source(nats: Nats) -> None:
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, concurrency=1) as s, s.reading() as call:
        first, second = await ahead_with_another_output(s)
        s.pace["i1"] = 13
        await until(second.cancelled.is_set)
        await until(lambda: any(not item.held for item in first.fed) and not first.held)
        s.pace["i1"] = s.pace["i2"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert s.runs("i2") == [second]
        assert await s.moved() == 0
        assert (await s.w.http.post("/fn/draw", json={})).json() == list(range(TOTAL)), "its slot is free"


async def test_another_output_found_at_the_death_of_the_source_is_one_death(nats: Nats) -> None:
    """So another one without anything new is not the last that it may have."""
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER, concurrency=1) as s, s.reading() as call:
        first, second = await ahead_with_another_output(s)
        s.dies_at["i2"] = 13
        s.pace["i2"] = TOTAL

        def judge(request: Open) -> Opened:
            if request.head.epoch > 3:
                s.dies_at.clear()
            return Opened(status="accepted")

        s.w.node.judge = judge
        for number in (10, 11, 12):  # in one message with its end: nothing is looked at between them
            first.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number * 7,))))
            first.outbox.push_value(FrameKind.OUTPUT, json.dumps(number).encode())
        first.end(InstanceLost("i1 died"))
        assert values((await call).text) == list(range(TOTAL))
        await until(second.cancelled.is_set)
        assert [run.head.epoch for run in s.runs("i2")] == [2, 3, 4]


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
        call = asyncio.create_task(s.w.http.post("/fn/draw", json={}))
        await until(lambda: s.acked("i1") >= 4)
        await s.deploy(moves=True)
        assert json.loads((await call).text) == [str(number) * (2 * MAX_PART) for number in range(4)]
        assert await s.moved() == 1


@pytest.mark.parametrize("how", ["handed", "dies"])
async def test_a_value_larger_than_all_that_a_destination_may_send(nats: Nats, how: str) -> None:
    """What of it the caller has from the source is dropped as it comes: the rest of it would never come."""
    big = {"handed": 11 + IN_STEP, "dies": 10}[how]
    async with scene(nats, quiet_s=NEVER, stop_s=NEVER) as s, s.reading() as call:
        s.value = lambda _, number: number if number != big else "x" * (WINDOW + MAX_PART)
        if how == "handed":
            await s.to_one_that_keeps_up()
            (first,) = s.runs("i1")
            s.last = s.pace["i1"] = big
            await until(lambda: first.held)
            s.pace["i1"] = big + 1
        else:
            await s.to_one_that_rests()
            kept = s.moving().resumption
            assert kept is not None
            s.pace["i1"] = big + 1
            await until(lambda: kept.delivered > big)
            s.dies_at["i1"], s.pace["i1"] = big + 2, big + 3
        found = values((await call).text)
        assert [at for at, value in enumerate(found) if value != at] == [big]
        assert len(found) == TOTAL
        assert len(s.runs("i2")) == 1


async def test_a_destination_of_another_numerics_class_is_not_asked(nats: Nats) -> None:
    async with scene(nats) as s, s.reading() as call:
        source, other = entry("i1", fingerprint="f", moves_to="i2"), entry("i2", fingerprint="g")
        await s.w.deploy(engine("draw"), source, other, script=s.draw)
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert not s.runs("i2")


@pytest.mark.parametrize("slowly", [True, False])
async def test_a_kept_call_that_has_moved_says_so_once_it_has_ended(nats: Nats, slowly: bool) -> None:
    """It is read from its journal then: the instance that had it last is not the one that it has left."""
    async with scene(nats) as s:
        s.held = asyncio.Event()
        await s.deploy()
        s.pace["i1"] = 10
        call = (await s.w.http.post("/fn/draw", json={}, headers={"prefer": "respond-async"})).json()["id"]
        await until(lambda: s.acked("i1") >= 20)
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        if slowly:  # and its journal is written meanwhile
            s.pace["i1"] = 12
            await until(lambda: s.acked("i1") >= 24)
        s.held.set()
        s.pace["i2"] = 15
        await until(lambda: s.acked("i2") >= 15)
        s.pace["i2"] = TOTAL

        async def told() -> Any:
            return (await s.w.http.get(f"/v1/calls/{call}")).json()

        async def over() -> bool:
            return bool((await told())["state"] == "SUCCEEDED")

        await until(over)
        assert await s.moved() == 1
        assert (await told())["instance"] == "i2"


def test_one_that_ends_with_fewer_outputs_than_its_source_has_given_says_something_else() -> None:
    answer: list[Step] = [(0, (number,), [b"x"]) for number in range(4)]
    kept = Resumption()
    kept.take(frames_of(answer, upto=2))
    kept.watch()
    move = move_of(kept)
    move.opened(False, NOW)
    move.take(frames_of(answer, delivered=2, upto=3), NOW)
    kept.take(frames_of(answer, delivered=2, upto=4)[-4:])
    move.take([Frame(0, FrameKind.END, codec.pack(End()))], NOW)
    with pytest.raises(NotDeterministic):
        move.switch(NOW)


async def test_a_destination_that_ends_before_its_source_has_is_not_used(nats: Nats) -> None:
    """Its function is not deterministic: what its caller has by then is no whole answer."""
    async with scene(nats) as s, s.reading() as call:
        s.held, s.ends_at["i2"], s.pace["i2"] = asyncio.Event(), 12, TOTAL
        await s.deploy(moves=True)
        await until(lambda: s.runs("i2"))
        s.pace["i1"] = 16
        await until(lambda: s.acked("i1") >= 32)
        s.held.set()
        (second,) = s.runs("i2")
        await until(lambda: second.outbox.ended)
        await asyncio.sleep(4 * TICK_S)
        s.pace["i1"] = TOTAL
        assert values((await call).text) == list(range(TOTAL))
        assert await s.moved() == 0
