"""How what a gateway left is taken up: several calls together, by each gateway in an order of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sllm_gateway.ledger import Ledger
from sllm_gateway.succession import Succession, _Taken
from sllm_gateway.taking_up import AT_ONCE, TakingUp
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.calls import CallOrder, Journaled
from sllm_runtime.protocol.errors import QueueFull, Unavailable
from sllm_runtime.protocol.lives import Life, Log, Whole
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


def taking_up(
    life: str, take_over: Callable[[str], Awaitable[None]], go_on: Callable[[str], None] = lambda call: None
) -> TakingUp:
    """Of a gateway that finds CALLS, all left by another one."""
    orders = {call: asked(call, OTHER.life, "g2", parts=0) for call in CALLS}

    async def every() -> dict[str, Journaled]:
        return {call: Journaled(order=order) for call, order in orders.items()}

    async def take(_: str, known: CallOrder, mine: CallOrder, keep_s: float) -> int:
        await take_over(known.call)
        orders[known.call] = mine
        return 1

    async def now(_: str, call: str) -> tuple[Journaled, list[Any]]:
        return Journaled(order=orders[call]), []

    me = Life(life=life, gateway="g1")
    over = roll(OTHER, Life(life=OTHER.life, gateway="g2", over=True))
    return TakingUp(
        cast(Any, SimpleNamespace(runs=lambda _: False, go_on=lambda order, *_: go_on(order.call))),
        cast(Any, SimpleNamespace(all=every, take_over=take, now=now)),
        cast(Any, SimpleNamespace(get=lambda *_: None)),
        cast(Any, SimpleNamespace(me=me)),
        over,
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

    one = taking_up("a" * 12, take, go_on)
    with pytest.raises(Unavailable):
        await one._take_up()
    one._detached.runs = lambda call: call in gone_on  # type: ignore[method-assign]
    for _ in range(2):
        await one._take_up()
    assert sorted(gone_on) == sorted(CALLS)


async def test_streams_are_written_together() -> None:
    crowd = Crowd()
    streams = tuple(
        Whole(order=asked(call, parts=0), body=b"", epoch=0, numerics="", exact=True, ids=()) for call in CALLS
    )

    async def create(_: str, call: str, *__: Any) -> None:
        await crowd.wait(call)

    async def log_of(_: str) -> dict[int, Log]:
        return {0: Log(streams)}

    async def heard(*_: Any) -> dict[int, Log]:
        return {}

    lives = cast(Any, SimpleNamespace(me=Life(life="m" * 12, gateway="g1"), log_of=log_of))
    journal, hearsay = cast(Any, SimpleNamespace(create=create)), cast(Any, SimpleNamespace(of=heard))
    none = cast(Any, None)
    succession = Succession(lives, roll(OTHER), Ledger(), hearsay, journal, none, none, lambda: 0.0)
    keeping = asyncio.create_task(succession._keep_left(OTHER.life, _Taken()))
    try:
        await until(lambda: len(crowd.together) == AT_ONCE)
        crowd.open.set()
        assert await asyncio.wait_for(keeping, GIVE_UP_S) == set(CALLS)
    finally:
        await end({keeping})
    assert crowd.most == AT_ONCE
