"""How what a gateway left is taken up: several calls together, by each gateway in an order of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from sllm_gateway.ledger import Ledger
from sllm_gateway.succession import COMING_S, SAID_S, Succession, _Taken
from sllm_gateway.taking_up import AT_ONCE, TakingUp
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.calls import Began, CallOrder, Ended, Journaled
from sllm_runtime.protocol.errors import Draining, InstanceLost, ProtocolError, QueueFull, StoreFull, Unavailable
from sllm_runtime.protocol.lives import Life, Log, Whole
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import BODIES_STREAM, JOURNAL_STREAM
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.test_succession import OTHER, asked, roll

CALLS = [f"call-{number}" for number in range(3 * AT_ONCE)]


class Crowd:
    """Who waits for JetStream; ``open`` lets them go."""

    def __init__(self) -> None:
        self.together: set[str] = set()
        self.most = 0
        self.open = asyncio.Event()

    async def wait(self, call: str) -> None:
        self.together.add(call)
        self.most = max(self.most, len(self.together))
        await self.open.wait()
        self.together.discard(call)


class Kept:
    """What JetStream has of CALLS, all left by another gateway, and how often it is asked."""

    def __init__(self) -> None:
        self.orders = {call: asked(call, OTHER.life, "g2", parts=0) for call in CALLS}
        self.began: set[str] = set()
        self.cancelled: set[str] = set()
        self.asked: Counter[str] = Counter()


def taking_up(
    life: str,
    take_over: Callable[[str], Awaitable[None]],
    go_on: Callable[[str], None] = lambda call: None,
    *,
    has_room: Callable[[CallOrder], bool] = lambda _: True,
    ends: Callable[[str], bool] = lambda _: False,
    kept: Kept | None = None,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> TakingUp:
    """Of a gateway that finds CALLS."""
    kept = kept or Kept()
    orders = kept.orders

    async def every() -> dict[str, Journaled]:
        kept.asked["all"] += 1
        began = Began(at=0.0, numerics="", epoch=1)
        return {
            call: Journaled(order=order, began=began if call in kept.began else None) for call, order in orders.items()
        }

    async def asked_to_cancel() -> set[str]:
        kept.asked["asked_to_cancel"] += 1
        return kept.cancelled

    async def take(_: str, known: CallOrder, mine: CallOrder, keep_s: float) -> int:
        kept.asked["take_over"] += 1
        await take_over(known.call)
        orders[known.call] = mine
        return 1

    async def now(_: str, call: str) -> tuple[Journaled, list[Any]]:
        kept.asked["now"] += 1
        return Journaled(order=orders[call]), []

    me = Life(life=life, gateway="g1")
    over = roll(OTHER, Life(life=OTHER.life, gateway="g2", over=True))
    return TakingUp(
        cast(
            Any,
            SimpleNamespace(
                runs=lambda _: False,
                ends=ends,
                go_on=lambda order, *_: go_on(order.call),
                has_room=has_room,
            ),
        ),
        cast(Any, SimpleNamespace(all=every, take_over=take, now=now, asked_to_cancel=asked_to_cancel)),
        cast(Any, SimpleNamespace(get=lambda *_: None)),
        cast(Any, SimpleNamespace(me=me, recorded=lambda: asyncio.sleep(0))),
        over,
        pause,
    )


async def test_so_many_are_claimed_together() -> None:
    crowd, gone_on = Crowd(), list[str]()
    one = taking_up("a" * 12, crowd.wait, gone_on.append)
    taking = asyncio.create_task(one._take_up())
    try:
        await until(lambda: len(crowd.together) == AT_ONCE)
        crowd.open.set()
        await asyncio.wait_for(taking, GIVE_UP_S)
    finally:
        await end({taking})
    assert crowd.most == AT_ONCE
    assert sorted(gone_on) == sorted(CALLS)


async def test_two_gateways_begin_with_others() -> None:
    """Else both would write the same orders, one of them in vain."""
    begun = []
    for life in ("a" * 12, "b" * 12):
        crowd = Crowd()
        taking = asyncio.create_task(taking_up(life, crowd.wait)._take_up())
        try:
            await until(lambda: len(crowd.together) == AT_ONCE)  # noqa: B023 - awaited here
            begun.append(set(crowd.together))
        finally:
            await end({taking})
    assert begun[0] != begun[1]


async def test_what_there_was_no_room_for_or_no_answer_to_is_gone_on_with_in_the_next_round() -> None:
    gone_on, lacks, silent = list[str](), {CALLS[0]}, {CALLS[1]}

    async def take(call: str) -> None:
        if call in silent:
            silent.remove(call)
            raise Unavailable("electing")

    def go_on(call: str) -> None:
        if call in lacks:
            lacks.remove(call)
            raise QueueFull("no room")
        gone_on.append(call)

    kept = Kept()
    kept.orders[CALLS[0]] = asked(CALLS[0], OTHER.life, "g2", parts=0, function="full")
    one = taking_up("a" * 12, take, go_on, kept=kept)
    with pytest.raises(Unavailable):
        await one._take_up()
    one._detached.runs = lambda call: call in gone_on  # type: ignore[method-assign]
    for _ in range(2):
        await one._take_up()
    assert sorted(gone_on) == sorted(CALLS)


async def nothing(_: str) -> None:
    """JetStream takes it at once."""


async def test_calls_that_find_no_room_are_neither_claimed_nor_read_until_there_is() -> None:
    """But for those that may have to end: an instance has had them, or somebody wants them ended."""
    kept, rounds, room, asked_for_room = Kept(), 0, False, 0
    begun, cancelled, gone_on, then = CALLS[0], CALLS[1], list[str](), Counter[str]()
    kept.began.add(begun)
    went = asyncio.Event()

    async def pause(_: float) -> None:
        nonlocal rounds, room
        rounds += 1
        if rounds == 3:
            kept.cancelled.add(cancelled)
        room = rounds >= 5
        await asyncio.sleep(0)

    def has_room(_: CallOrder) -> bool:
        nonlocal asked_for_room
        asked_for_room += 1
        return room

    def go_on(call: str) -> None:
        if not room and call != cancelled:
            raise QueueFull("no room")
        gone_on.append(call)
        if call == cancelled:
            then.update(kept.asked, rounds=rounds, room=asked_for_room)
        if len(gone_on) == len(CALLS):
            went.set()

    one = taking_up("a" * 12, nothing, go_on, has_room=has_room, kept=kept, pause=pause)
    one.start()
    try:
        await asyncio.wait_for(went.wait(), GIVE_UP_S)
    finally:
        await one.close()
    assert sorted(gone_on) == sorted(CALLS)
    assert then.pop("room") <= 4, "once a round"
    assert then == {"all": 1, "asked_to_cancel": 3, "take_over": 2, "now": 4, "rounds": 3}
    assert rounds == 5
    assert kept.asked == {"all": 1, "asked_to_cancel": 5, "take_over": len(CALLS), "now": 2 * len(CALLS) + 2}


async def test_what_waits_for_room_and_is_claimed_elsewhere_is_looked_at_as_it_is_then() -> None:
    kept, room, gone_on = Kept(), False, list[str]()
    one = taking_up("a" * 12, nothing, gone_on.append, has_room=lambda _: room, kept=kept)
    await one._take_up()
    assert set(one._waiting) == set(CALLS)
    other = Life(life="c" * 12, gateway="g3")
    one._roll.heard(other)
    kept.orders[CALLS[0]] = asked(CALLS[0], other.life, other.gateway, parts=0)
    await one._take_up()
    assert CALLS[0] not in one._waiting, "it is another gateway's"
    one._roll.heard(Life(life=other.life, gateway=other.gateway, over=True))
    await one._take_up()
    assert one._waiting[CALLS[0]].gateway == "g3", "which is no more"
    room = True
    await one._take_up(anew=False)
    assert sorted(gone_on) == sorted(CALLS)
    assert not one._waiting


def alone(order: CallOrder, *, go_on: Callable[[str], None]) -> tuple[TakingUp, Kept]:
    """A gateway that finds this one."""
    kept = Kept()
    kept.orders = {order.call: order}
    return taking_up("a" * 12, nothing, go_on, kept=kept), kept


LEFT = asked(CALLS[0], OTHER.life, "g2", parts=0)


async def test_one_that_ends_here_is_gone_on_with_after_that() -> None:
    """Also where there is room for both."""
    ending, gone_on, kept = True, list[str](), Kept()
    kept.orders = {LEFT.call: LEFT}
    one = taking_up("a" * 12, nothing, gone_on.append, ends=lambda _: ending, kept=kept)
    await one._take_up()
    assert (gone_on, kept.asked["take_over"], one._pending) == ([], 0, 1)
    ending = False
    await one._take_up()
    assert gone_on == [LEFT.call]


async def test_an_order_that_was_written_without_a_word_of_it_is_this_gateways() -> None:
    """By then it names the life of the gateway that asks: nobody else would take it up."""
    gone_on, heard = list[str](), False
    kept = Kept()
    kept.orders = {LEFT.call: LEFT}

    async def take(call: str) -> None:
        nonlocal heard
        if not heard:
            heard, kept.orders[call] = True, replace(LEFT, life="a" * 12, gateway="g1")
            raise Unavailable("electing")

    one = taking_up("a" * 12, take, gone_on.append, kept=kept)
    one._roll.heard(one._lives.me)
    with pytest.raises(Unavailable):
        await one._take_up()
    await one._take_up()
    assert gone_on == [LEFT.call]


async def test_one_that_has_ended_meanwhile_is_not_begun_again() -> None:
    gone_on = list[str]()
    one, kept = alone(LEFT, go_on=gone_on.append)

    async def now(*_: str) -> tuple[Journaled, list[Any]]:
        return Journaled(order=kept.orders[LEFT.call], ended=Ended(at=0.0, state=CallState.SUCCEEDED)), []

    one._journal.now = now  # type: ignore[assignment, method-assign]
    await one._take_up()
    assert (gone_on, one._pending) == ([], 0)


@pytest.mark.parametrize("mine", [True, False])
async def test_a_journal_that_lacks_what_is_stored_is_read_again(mine: bool) -> None:
    """Unless another gateway has the call by now."""
    gone_on, lacks = list[str](), True
    one, kept = alone(LEFT, go_on=gone_on.append)
    now = one._journal.now

    async def find(call: str) -> tuple[str, CallOrder]:
        return "", kept.orders[call] if mine else LEFT

    async def reads(stream: str, call: str) -> tuple[Journaled, list[Any]]:
        return (Journaled(), []) if lacks else await now(stream, call)

    one._journal.find, one._journal.now = find, reads  # type: ignore[assignment, method-assign]
    await one._take_up()
    assert (gone_on, one._pending) == ([], int(mine))
    lacks = False
    await one._take_up(anew=False)
    assert gone_on == [LEFT.call] * mine


async def test_a_gateway_that_stops_gives_no_call_up() -> None:
    """Its next life, or another one, goes on with it: no end of it is written."""

    def stops(_: str) -> None:
        raise Draining("this one stops")

    one, _ = alone(LEFT, go_on=stops)
    await one._take_up()
    assert one._pending == 0


async def test_one_that_cannot_go_on_is_ended_as_long_as_it_is_this_gateways() -> None:
    ended = list[Any]()

    def cannot(_: str) -> None:
        raise InstanceLost("it is not resumable")

    async def ends(order: CallOrder, state: CallState, error: Exception, fence: int | None) -> None:
        ended.append((order.life, state, str(error), fence))

    one, _ = alone(LEFT, go_on=cannot)
    one._detached.end = ends  # type: ignore[assignment, method-assign]
    await one._take_up()
    assert ended == [("a" * 12, CallState.FAILED, "it is not resumable", 1)]
    assert one._pending == 0


@pytest.mark.parametrize(("gateway", "taken"), [("g1", True), ("g3", False)])
async def test_of_orders_without_a_life_those_of_this_gateway_are_its_own(gateway: str, taken: bool) -> None:
    gone_on = list[str]()
    one, _ = alone(replace(LEFT, life="", gateway=gateway), go_on=gone_on.append)
    await one._take_up()
    assert bool(gone_on) is taken


@pytest.mark.parametrize(("record", "taken"), [(Life(life="n" * 12, gateway="g4"), False), (None, True)])
async def test_of_a_life_that_was_not_heard_of_the_record_is_read(record: Life | None, taken: bool) -> None:
    gone_on = list[str]()
    one, _ = alone(replace(LEFT, life="n" * 12, gateway="g4"), go_on=gone_on.append)

    async def find(_: str) -> Life | None:
        return record

    one._lives.find = find  # type: ignore[assignment, method-assign]
    await one._take_up()
    assert bool(gone_on) is taken


async def test_what_another_release_has_written_holds_up_no_other() -> None:
    gone_on = list[str]()
    one, kept = alone(LEFT, go_on=gone_on.append)
    kept.orders["call-x"] = asked("call-x", "n" * 12, "g4", parts=0)

    async def find(_: str) -> Life:
        raise ProtocolError("a schema of another release")

    one._lives.find = find  # type: ignore[assignment, method-assign]
    await one._take_up()
    assert gone_on == [LEFT.call]
    assert kept.orders["call-x"].life == "n" * 12


async def test_one_that_was_gone_on_with_here_and_is_another_gateways_by_now_is_left_to_it() -> None:
    """That one took this gateway for dead."""
    gone_on, other = list[str](), Life(life="c" * 12, gateway="g3")
    one, kept = alone(LEFT, go_on=gone_on.append)
    await one._take_up()
    one._roll.heard(other)
    kept.orders[LEFT.call] = replace(LEFT, life=other.life, gateway=other.gateway)
    await one._take_up()
    assert gone_on == [LEFT.call]
    assert kept.orders[LEFT.call].life == other.life


async def test_what_is_claimed_is_of_a_life_that_others_know() -> None:
    """The one in which the round began may be over."""
    one, kept = alone(LEFT, go_on=lambda _: None)
    new = Life(life="n" * 12, gateway="g1")

    async def recorded() -> None:
        one._lives.me = new

    one._lives.recorded = recorded  # type: ignore[method-assign]
    await one._take_up()
    assert kept.orders[LEFT.call].life == new.life


async def test_what_was_left_and_no_list_has_waits_for_no_room() -> None:
    """It may be such that has to end: whether it began is not known."""
    gone_on, kept = list[str](), Kept()
    kept.orders = {LEFT.call: LEFT}
    one = taking_up("a" * 12, nothing, gone_on.append, has_room=lambda _: False, kept=kept)

    async def nobody() -> dict[str, Journaled]:
        return {}

    async def find(call: str) -> tuple[str, CallOrder]:
        return JOURNAL_STREAM, kept.orders[call]

    one._journal.all, one._journal.find = nobody, find  # type: ignore[assignment, method-assign]
    one._left.add(LEFT.call)
    await one._take_up()
    assert gone_on == [LEFT.call]


async def test_what_cannot_be_listed_is_looked_for_again() -> None:
    went, failed = asyncio.Event(), False
    one, _ = alone(LEFT, go_on=lambda _: went.set())
    every = one._journal.all

    async def lists() -> dict[str, Journaled]:
        nonlocal failed
        if not failed:
            failed = True
            raise Unavailable("electing")
        return await every()

    async def at_once(_: float) -> None:
        await asyncio.sleep(0)

    one._journal.all, one._pause = lists, at_once  # type: ignore[method-assign]
    one.start()
    try:
        await asyncio.wait_for(went.wait(), GIVE_UP_S)
    finally:
        await one.close()


def inheriting(create: Callable[..., Awaitable[bool]]) -> Succession:
    """What makes kept calls of the streams that another gateway has left, all of CALLS."""
    streams = tuple(Whole(order=asked(call), body=b"{}", epoch=0, numerics="", exact=True, ids=()) for call in CALLS)

    async def log_of(_: str) -> dict[int, Log]:
        return {0: Log(streams)}

    async def heard(*_: Any) -> tuple[dict[int, Log], set[str]]:
        return {}, set()

    async def has(_: str) -> bool:
        return False

    lives = cast(Any, SimpleNamespace(me=Life(life="m" * 12, gateway="g1"), log_of=log_of))
    journal, hearsay = cast(Any, SimpleNamespace(create=create, has=has)), cast(Any, SimpleNamespace(of=heard))
    none = cast(Any, None)
    return Succession(lives, roll(OTHER), Ledger(), hearsay, journal, none, none, lambda: 0.0)


async def test_one_whose_body_finds_no_room_holds_up_no_other() -> None:
    made, ended = list[str](), list[str]()

    async def create(stream: str, call: str, entry: object, *_: Any, **__: Any) -> bool:
        if stream == BODIES_STREAM and call == CALLS[3]:
            raise StoreFull("full")
        if isinstance(entry, Ended):
            ended.append(call)
        elif stream == JOURNAL_STREAM:
            made.append(call)
        return True

    assert await inheriting(create)._keep_left(OTHER.life, _Taken()) == set(CALLS)
    assert set(made) == set(CALLS) - {CALLS[3]}
    assert ended == [CALLS[3]], "who reads it is told"


async def test_while_somebody_is_silent_kept_calls_are_not_listed_anew_each_time() -> None:
    looked, left = list[set[str]](), Life(life=OTHER.life, gateway="g2", heir="m" * 12)

    async def create(*_: Any, **__: Any) -> bool:
        return True

    async def heard(*_: Any) -> tuple[dict[int, Log], set[str]]:
        return {}, {"g3"}

    succession = inheriting(create)
    succession._hearsay = cast(Any, SimpleNamespace(of=heard))
    succession._taking_up = cast(Any, SimpleNamespace(look=looked.append))
    for _ in range(3):
        with pytest.raises(Unavailable, match="g3 may have heard more of it"):
            await succession._inherit(left)
    assert looked == [set(CALLS)]


async def test_who_stays_silent_is_asked_each_time_and_waited_for_no_longer_than_that() -> None:
    """Also one that nobody has heard of since. Readers wait for COMING_S at most."""
    assert SAID_S < COMING_S / 2
    asked_for, now = list[set[str]](), 0.0
    left = Life(life=OTHER.life, gateway="g2", heir="m" * 12)
    settled = replace(left, settled=True)

    async def create(*_: Any, **__: Any) -> bool:
        return True

    async def heard(_: str, __: int, others: set[str]) -> tuple[dict[int, Log], set[str]]:
        asked_for.append(others)
        return {}, {"g3"}

    async def settle(_: Life) -> Life:
        return settled

    succession = inheriting(create)
    succession._hearsay = cast(Any, SimpleNamespace(of=heard))
    succession._taking_up = cast(Any, SimpleNamespace(look=lambda _: None))
    succession._lives.settle = settle  # type: ignore[assignment, method-assign]
    succession._clock = lambda: now
    for passed in (0.0, SAID_S - 1):
        now = passed
        with pytest.raises(Unavailable, match="g3 may have heard more of it"):
            await succession._inherit(left)
    now = SAID_S
    await succession._inherit(left)
    assert ["g3" in others for others in asked_for] == [False, True, True]
    assert succession._roll.abandoned("m" * 12) == []


async def test_streams_are_written_together() -> None:
    crowd = Crowd()

    async def create(_: str, call: str, *__: Any, **___: Any) -> bool:
        await crowd.wait(call)
        return True

    succession, taken = inheriting(create), _Taken()
    keeping = asyncio.create_task(succession._keep_left(OTHER.life, taken))
    try:
        await until(lambda: len(crowd.together) == AT_ONCE)
        crowd.open.set()
        assert await asyncio.wait_for(keeping, GIVE_UP_S) == set(CALLS)
        assert await succession._keep_left(OTHER.life, taken) == set(), "it is woken for none a second time"
        assert taken.last == 0
    finally:
        await end({keeping})
    assert crowd.most == AT_ONCE


async def test_one_that_another_gateway_took_as_no_word_came_of_ones_own_try_is_left_to_it() -> None:
    """Nothing of that try was stored, and the other one lives."""
    other, gone_on, kept = Life(life="c" * 12, gateway="g3"), list[str](), Kept()
    kept.orders = {LEFT.call: LEFT}

    async def take(call: str) -> None:
        if kept.asked["take_over"] == 1:
            kept.orders[call] = replace(LEFT, life=other.life, gateway=other.gateway)
            raise Unavailable("electing")

    one = taking_up("a" * 12, take, gone_on.append, kept=kept)
    one._roll.heard(other)
    with pytest.raises(Unavailable):
        await one._take_up()
    await one._take_up()
    assert gone_on == []
    assert kept.orders[LEFT.call].life == other.life
