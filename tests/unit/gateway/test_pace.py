"""The reserve of a stream whose call moves: what is written when."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_gateway.arrivals import Arrivals
from sllm_gateway.call import Call
from sllm_gateway.pace import EXPECTED_S, GIVES_BACK, KNOWN, LATE_S, MOST, QUICKEN, SLOW_S, STAYS, STRETCH, Pace
from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.frames import Frame, FrameKind, Ids
from sllm_runtime.protocol.states import CallState
from tests.fixtures.waiting import until
from tests.unit.gateway.test_arrivals import call_named

NOW = 100.0
STEP = 2.0**-8
"""Seconds from one token to the next: about those of the demo model."""
gaps = st.floats(0.0, 6.0)
"""In STEPs."""


def token(number: int, *, more: bool = False) -> list[Frame]:
    """As a stream has it while its call moves: an id, and the output."""
    ids = Frame(2 * number, FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
    return [ids, Frame(2 * number + 1, FrameKind.OUTPUT, b"%d" % number, more)]


def played(pace: Pace, arrivals: list[float], ends: float = float("inf")) -> list[tuple[float, int]]:
    """When each token is written, of those that come at ``arrivals``, and which it is. Timers are exact."""
    waiting, written, now = list[Frame](), list[tuple[float, int]](), arrivals[0]
    coming, ended = list(enumerate(arrivals)), False
    while coming or waiting:
        following = [coming[0][1]] if coming else []
        following += [max(now, pace.due)] if waiting else []
        following += [max(now, ends)] if not ended and ends < float("inf") else []
        now = min(following) if following else now
        if not ended and now >= ends:
            ended = True
            pace.end()
        while coming and coming[0][1] <= now:
            waiting += token(coming.pop(0)[0])
        written += [(now, int(frame.data)) for frame in pace.release(waiting, now) if frame.kind is FrameKind.OUTPUT]
        assert len(waiting) <= 2 * MOST
        assert coming or not waiting or pace.due > now, "it is looked at again and again"
    return written


def steady(count: int, start: float = NOW) -> list[float]:
    return [start + STEP * at for at in range(count)]


@given(st.lists(gaps, min_size=1, max_size=60), st.floats(0.0, 40.0), st.sampled_from([0.0, 0.5, 1.0, 3.0, 1000.0]))
def test_all_is_written_in_order_and_little_is_kept(between: list[float], ends: float, usual: float) -> None:
    """However they come, whenever it ends, whatever is thought of their interval."""
    arrivals = list(itertools.accumulate((gap * STEP for gap in between), initial=NOW))
    written = played(Pace(usual * STEP, NOW), arrivals, NOW + ends * STEP)
    assert [number for _, number in written] == list(range(len(arrivals)))
    assert all(at >= arrivals[number] for at, number in written)


@pytest.mark.parametrize("pause", [1.0, 2.0, 4.0, sum(STRETCH) + STRETCH[-1]])
@pytest.mark.parametrize("usual", [0.0, STEP])
def test_a_pause_is_not_seen(pause: float, usual: float) -> None:
    before = steady(40)
    arrivals = before + steady(80, before[-1] + pause * STEP)
    written = [at for at, _ in played(Pace(usual, NOW - STEP), arrivals, before[-1] + (pause + 1) * STEP)]
    seen = max(after - before for before, after in itertools.pairwise(written))
    assert seen <= STRETCH[-1] * STEP * (1.001 if usual else 1.15), "the pause itself is in what was not known before"
    assert written[-1] == arrivals[-1], "nobody is late by it any more"


def test_a_longer_pause_is_shorter_by_the_reserve() -> None:
    before = steady(40)
    arrivals = before + steady(40, before[-1] + 20 * STEP)
    written = [at for at, _ in played(Pace(STEP, NOW), arrivals)]
    seen = max(after - before for before, after in itertools.pairwise(written))
    assert seen == pytest.approx((20 - sum(STRETCH)) * STEP, rel=0.01)


def test_what_slows_the_source_while_its_call_moves_does_not_slow_its_caller() -> None:
    pace = Pace(STEP, NOW)
    played(pace, [NOW + 3 * STEP * at for at in range(20)])
    assert pace.interval == STEP


def test_an_interval_that_has_a_pause_of_before_in_it_is_put_right() -> None:
    pace = Pace(40 * STEP, NOW)
    played(pace, steady(20))
    assert pace.interval == pytest.approx(STEP, rel=0.1)


@pytest.mark.parametrize(
    ("interval", "most"),
    [(0.0, 0), (STEP, MOST), (LATE_S / 2, 2), (LATE_S * 0.9, 1), (SLOW_S, 1), (SLOW_S * 1.1, 0)],
)
def test_the_reserve_is_bounded_in_time(interval: float, most: int) -> None:
    pace = Pace(interval, NOW)
    assert pace.most(NOW) == most
    pace.end()
    pace.release([], NOW)
    assert pace.most(NOW + 0.9 * STAYS * interval) == most
    later = NOW + (STAYS + GIVES_BACK * MOST + 0.1) * interval
    assert pace.most(later) == 0
    pace.go_on()
    assert pace.most(later) == most


def test_where_no_interval_is_known_nothing_is_kept() -> None:
    waiting = token(0)
    assert len(Pace(0.0, NOW).release(waiting, NOW)) == 2


def test_a_large_value_is_passed_on_part_by_part() -> None:
    pace, waiting = Pace(STEP, NOW), [*token(0), *token(1, more=True)]
    assert len(pace.release(waiting, NOW)) == 4
    waiting = token(1)[1:]
    assert len(pace.release(waiting, NOW)) == 1, "nor does its last part wait"
    waiting = token(2)
    assert pace.release(waiting, NOW) == []


def test_parts_of_a_large_value_do_not_wait_for_what_comes_between_them() -> None:
    pace, ids = Pace(STEP, NOW), token(9)[:1]
    waiting = [*token(0), *token(1, more=True), *ids]
    assert len(pace.release(waiting, NOW)) == 5
    waiting = [*ids, *token(1)[1:]]
    assert len(pace.release(waiting, NOW)) == 2, "nor does its last part wait"


def test_it_is_made_anew_where_it_was_given_back() -> None:
    pace = Pace(STEP, NOW)
    for began in (NOW, NOW + 2 * EXPECTED_S):
        pace.expect(began)
        assert pace.stays(began)
        assert not pace.stays(began + EXPECTED_S)
    pace.end()
    assert not pace.stays(NOW + 2 * EXPECTED_S)
    pace.expect(NOW + 3 * EXPECTED_S)
    assert pace.stays(NOW + 3 * EXPECTED_S)


def test_it_is_given_back_also_where_the_destination_is_much_quicker() -> None:
    before = steady(20)
    arrivals = before + [before[-1] + STEP * at / 8 for at in range(1, 400)]
    written = played(Pace(STEP, NOW), arrivals, before[-1])
    assert written[-1][0] == arrivals[-1]
    late = before[-1] + (STAYS + GIVES_BACK * MOST) * STEP
    assert any(at > late for at in arrivals)
    assert all(at == arrivals[number] for at, number in written if at > late)


def test_it_is_given_back_when_the_call_moves_no_more() -> None:
    """But not at once: what makes pauses is not over with the move."""
    pace, waiting = Pace(STEP, NOW), list[Frame]()
    pace.end()
    for number in range(int(STAYS)):
        waiting += token(number)
        pace.release(waiting, NOW + number * STEP)
        assert not pace.over(waiting, NOW + number * STEP)
    assert len(waiting) == 2 * MOST
    now = max(pace.due, NOW + STAYS * STEP)
    assert pace.release(waiting, now) == token(int(STAYS) - MOST)
    assert pace.due == pytest.approx(now + QUICKEN * STEP)
    pace.release(waiting, pace.due)
    pace.release(waiting, pace.due)
    assert pace.over(waiting, pace.due)


def test_one_that_is_given_back_stays_where_the_call_moves_again() -> None:
    pace, late = Pace(STEP, NOW), NOW + 2 * STAYS * STEP
    pace.end()
    pace.release([], NOW)
    assert pace.over([], late)
    pace.go_on()
    assert not pace.over([], late)


def until_full(pace: Pace, interval: float) -> int:
    """How many outputs that come so far apart it takes."""
    waiting, now = list[Frame](), NOW
    for number in range(100):
        while waiting and pace.due <= now:
            pace.release(waiting, pace.due)
        waiting += token(number)
        pace.release(waiting, now)
        if number > KNOWN and pace.full(now):
            return number
        now += interval
    return 100


@pytest.mark.parametrize("slower", [0.5, 1.0, 1.3, 2.0])
def test_it_is_made_before_the_call_is_on_its_way(slower: float) -> None:
    """By how the outputs come then, whatever their mean was."""
    pace = Pace(STEP, NOW)
    pace.expect(NOW)
    assert until_full(pace, slower * STEP) <= 16
    assert pace.interval == pytest.approx(slower * STEP)


def test_what_slows_the_source_afterwards_does_not_count_then_either() -> None:
    pace, waiting = Pace(STEP, NOW), list[Frame]()
    pace.expect(NOW)
    until_full(pace, 2 * STEP)
    pace.go_on()
    for number in range(100, 120):
        waiting += token(number)
        pace.release(waiting, NOW + 4 * STEP * number)
    assert pace.interval == pytest.approx(2 * STEP)


def test_it_is_given_back_where_the_move_does_not_begin() -> None:
    pace, waiting = Pace(STEP, NOW), token(0)
    pace.expect(NOW)
    assert pace.release(waiting, NOW) == []
    assert not pace.over([], NOW + 0.99 * EXPECTED_S)
    late = NOW + EXPECTED_S + GIVES_BACK * MOST * STEP
    assert pace.release(waiting, late) == token(0)
    assert pace.over(waiting, late)


def test_where_none_is_to_be_had_nobody_waits_for_it() -> None:
    for usual in (0.0, 1.1 * SLOW_S):
        pace = Pace(usual, NOW)
        pace.expect(NOW)
        assert pace.full(NOW)


# --- of a call --------------------------------------------------------------------------------------
def test_the_end_of_a_call_does_not_wait() -> None:
    call = call_named("moves")
    call.go(CallState.RUNNING)
    call.pace, call.frames = Pace(STEP, NOW), token(0) + token(1)
    assert call.take_due(NOW) == []
    assert len(call.held) == 4
    call.go(CallState.SUCCEEDED)
    assert call.take_due(NOW) == token(0) + token(1)
    assert call.pace is None
    assert not call.held


def test_what_is_in_reserve_is_the_callers_also_when_its_instance_dies() -> None:
    call = call_named("moves")
    call.resumption, call.pace = Resumption(), Pace(STEP, NOW)
    call.frames = token(0) + token(1)
    call.resumption.take(call.frames)
    assert call.take_due(NOW) == []
    assert call.break_off(stopped=False)
    call.pace.end()
    assert call.take_due(NOW + 1.0) == token(0)
    assert call.take_due(NOW + 2.0) == token(1)
    assert call.pace is None


def written_now(now: float) -> tuple[Call, list[Frame]]:
    """A call with two tokens and a reserve, and what was written of it."""
    call, written = call_named("moves"), list[Frame]()

    def write(now: float) -> bool:
        written.extend(call.take_due(now))
        return True

    call.write_now, call.pace, call.frames = write, Pace(STEP, now), token(0) + token(1)
    return call, written


async def test_it_is_written_when_it_is_due() -> None:
    """By a timer, with nothing that comes."""
    loop = asyncio.get_running_loop()
    call, written = written_now(loop.time())
    Arrivals(lambda *_: None, loop.time).add(call)
    await until(lambda: written == token(0) + token(1))
    assert not call.held


async def test_what_its_reader_has_kept_is_written_when_it_is_due() -> None:
    """Nothing came since: the reader wrote by itself, as after it had waited for its client."""
    loop = asyncio.get_running_loop()
    call, written = written_now(loop.time())
    assert call.take_due(loop.time()) == []
    arrivals = Arrivals(lambda *_: None, loop.time)
    arrivals.written(call)
    await until(lambda: written == token(0) + token(1))
    arrivals.written(call_named("of which nothing is kept"))


async def test_while_its_client_takes_nothing_it_is_not_looked_at_again_and_again() -> None:
    """The reader, which waits for it, does so itself then."""
    looked, call = list[float](), call_named("lags")

    class Counted(Arrivals):
        def add(self, call: Call) -> None:
            looked.append(0.0)
            super().add(call)

    loop = asyncio.get_running_loop()
    call.pace, call.held = Pace(STEP, loop.time()), token(0)
    call.writing = loop.time()
    arrivals = Counted(lambda *_: None, loop.time)
    arrivals.add(call)
    await asyncio.sleep(20 * STEP)
    assert len(looked) == 1
