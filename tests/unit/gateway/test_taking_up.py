"""How what a gateway left is taken up: several calls together, by each gateway in an order of its own."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sllm_gateway.ledger import Ledger
from sllm_gateway.succession import Succession, _Taken
from sllm_gateway.taking_up import AT_ONCE, TakingUp
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.calls import Began, CallOrder, Journaled
from sllm_runtime.protocol.errors import QueueFull, StoreFull, Unavailable
from sllm_runtime.protocol.lives import Life, Log, Whole
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
    made = list[str]()

    async def create(stream: str, call: str, *_: Any, **__: Any) -> bool:
        if stream == BODIES_STREAM and call == CALLS[3]:
            raise StoreFull("full")
        if stream == JOURNAL_STREAM:
            made.append(call)
        return True

    assert await inheriting(create)._keep_left(OTHER.life, _Taken()) == set(CALLS)
    assert set(made) == set(CALLS) - {CALLS[3]}


async def test_streams_are_written_together() -> None:
    crowd = Crowd()

    async def create(_: str, call: str, *__: Any, **___: Any) -> bool:
        await crowd.wait(call)
        return True

    keeping = asyncio.create_task(inheriting(create)._keep_left(OTHER.life, _Taken()))
    try:
        await until(lambda: len(crowd.together) == AT_ONCE)
        crowd.open.set()
        assert await asyncio.wait_for(keeping, GIVE_UP_S) == set(CALLS)
    finally:
        await end({keeping})
    assert crowd.most == AT_ONCE
