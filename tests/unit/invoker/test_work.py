"""What a worker is told of its calls, if it takes it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
import pytest

from sllm_invoker.account import Account
from sllm_invoker.call import Call
from sllm_invoker.work import REMEMBERED, Work
from sllm_runtime.control import instances
from sllm_runtime.control.view import Instance, View
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.frames import CallHead, End, Frame, FrameKind
from sllm_runtime.protocol.records import InstanceRecord
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.worker import CallBody, CallFrames
from tests.fixtures.invoker import order
from tests.fixtures.waiting import until
from tests.unit.control.world import deployed, manifest


class Told:
    """``work`` towards a worker that reads when the test does, and what is said of it."""

    def __init__(self, ours: socket.socket, theirs: socket.socket) -> None:
        self.wire, self.worker = AsyncWire(ours), theirs
        self.consumed: list[int] = []
        self.silent: list[SllmError] = []
        self.work = Work(
            order(), self.wire, lambda _: None, lambda _, cost: self.consumed.append(cost), self.silent.append,
            lambda: 0.0,
        )  # fmt: skip


def head_of(body_bytes: int) -> CallHead:
    return CallHead(
        call="c", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True, body_bytes=body_bytes,
        timeout_s=60.0, idle_timeout_s=60.0, seed=0, credit=limits.WINDOW,
    )  # fmt: skip


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    ours, theirs = socket.socketpair()
    made = Told(ours, theirs)
    yield made
    made.wire.close()
    theirs.close()


async def test_a_worker_that_takes_nothing_is_lost_and_what_waits_for_it_bounded(told: Told) -> None:
    for _ in range(64):
        told.work.tell(CallBody(1, bytes(limits.MAX_PART)))
        assert told.wire._queued < 10 * limits.MAX_MESSAGE
    assert told.silent
    assert isinstance(told.silent[0], Unavailable)


async def test_bodies_of_which_each_call_may_have_a_window_on_its_way_may_wait(told: Told) -> None:
    """However many calls there are: the worker takes them at its own pace."""
    calls = [told.work.next_number() for _ in range(12)]
    for number in calls:
        call = Call(number, "gw", head_of(2 * limits.WINDOW), 0.0)
        told.work.begin(call, [bytes(limits.MAX_PART)] * (limits.WINDOW // limits.MAX_PART))
    assert not told.silent
    told.work.cancel(call, "cancelled", "what else is said is heard")
    assert not told.silent
    got, loop = 0, asyncio.get_running_loop()
    told.worker.setblocking(False)
    while got < len(calls) * limits.WINDOW:
        got += len(await loop.sock_recv(told.worker, limits.MIB))
    await told.wire.drain()
    assert told.wire._queued == 0


async def test_a_worker_is_not_deaf_for_what_was_not_read_of_it(told: Told) -> None:
    """This process stood still; the END of what was cancelled may be there."""
    call = Call(told.work.next_number(), "gw", head_of(0), 0.0)
    told.work.begin(call, [])
    told.work.cancel(call, "cancelled", "")
    late = 2 * limits.LOST_AFTER_S
    assert told.work.deaf(late) is call
    told.work.forgive(late)
    assert told.work.deaf(late + limits.LOST_AFTER_S) is None
    assert told.work.deaf(late + limits.LOST_AFTER_S + 0.1) is call


async def test_one_that_has_gone_is_noticed_by_who_listens_to_it(told: Told) -> None:
    told.worker.close()
    for _ in range(2):
        told.work.tell(CallBody(1, b"1"))
    assert told.silent == []


async def test_credit_for_a_body_comes_when_the_worker_has_taken_it(told: Told) -> None:
    body = [bytes(limits.MAX_PART)] * 4
    size = sum(map(len, body))
    head = head_of(2 * size)
    feeding = asyncio.create_task(told.work.feed_back())
    told.work.begin(Call(told.work.next_number(), "gw", head, 0.0), body)
    for _ in range(10):
        await asyncio.sleep(0)
    assert told.consumed == []
    got, loop = 0, asyncio.get_running_loop()
    told.worker.setblocking(False)
    while got < size:
        got += len(await loop.sock_recv(told.worker, limits.MIB))
    await until(lambda: told.consumed == [len(part) + limits.FRAME_COST for part in body], what="it is granted")
    feeding.cancel()
    await asyncio.wait([feeding])


async def test_how_long_calls_take_is_not_learned_from_those_that_began_elsewhere() -> None:
    """A call that was moved here ran for most of its time where it came from."""
    now = 0.0
    ours, theirs = socket.socketpair()
    work = Work(order(), AsyncWire(ours), lambda _: None, lambda _, cost: None, lambda _: None, lambda: now)
    account = Account(order())
    work.open(holds=True)
    view = deployed(View(), manifest("f", concurrency=8))
    record = InstanceRecord(instance="i", function="f", version=1, node="n1", state=InstanceState.READY, created=0.0)
    view = view.put_instance(Instance(record=record, manifest=manifest("f"), placed=0.0, ready_at=0.0))

    def runs(head: CallHead, seconds: float) -> None:
        nonlocal now, view
        call = Call(work.next_number(), "gw", head, now)
        work.begin(call, [])
        now += seconds
        end = Frame(0, FrameKind.END, codec.pack(End()))
        work.on_message(CallFrames(((call.number, (end,)),)))
        said = msgspec.structs.replace(account.status(InstanceState.READY, work, now), function="f", version=1)
        view = instances.report(view, view.instances["i"], said, now)

    try:
        runs(head_of(0), 60.0)
        for _ in range(3):  # a node is drained, and its calls end here
            runs(msgspec.structs.replace(head_of(0), recorded=((1, 2, 3),), delivered=3, held=True), 2.0)
        assert view.learned.call_s(("f", 1)) == 60.0
        assert work.served == 4
    finally:
        work._wire.close()
        theirs.close()


async def test_a_call_that_runs_keeps_its_name_however_many_came_after_it(told: Told) -> None:
    """Its lines are its own for as long as it runs (``sllm fn logs --call``)."""
    end = Frame(0, FrameKind.END, codec.pack(End()))
    long = Call(told.work.next_number(), "gw", head_of(0), 0.0)
    told.work.begin(long, [])
    for _ in range(REMEMBERED + 1):
        short = Call(told.work.next_number(), "gw", head_of(0), 0.0)
        told.work.begin(short, [])
        told.work.on_message(CallFrames(((short.number, (end,)),)))
    assert told.work.running == 1
    assert told.work.name(long.number) == "c"
    assert told.work.name(1 + REMEMBERED) == "c", "one that ended lately has its name still"
    assert len(told.work._names) <= REMEMBERED + 1, "and others are forgotten"
    told.work.on_message(CallFrames(((long.number, (end,)),)))
    assert told.work.name(long.number) == "c", "it ended just now"
