"""What one call may send, and how it ends, however it is told to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import Cancelled, ErrorBody, SllmError
from sllm_runtime.protocol.frames import CallHead, End, Frame, FrameKind, Ids
from sllm_runtime.protocol.worker import CallBody, CallFrames, CancelCall, FeedCall, FromWorker, Heartbeat, StartCall
from sllm_runtime.worker.call import Call, IdRecorder
from sllm_runtime.worker.calls import Calls
from sllm_runtime.worker.console import Console
from sllm_runtime.worker.outgoing import CallEnded, Outgoing
from sllm_runtime.worker.sender import Sender
from tests.fixtures.waiting import GIVE_UP_S, until

OUTPUT = FrameKind.OUTPUT
COST = limits.FRAME_COST
Told = Callable[[int], list[Frame]]
FIRST = Cancelled("the first reason").body()


@pytest.fixture
def ends() -> Iterator[tuple[Sender, Told]]:
    """A worker's sender, and what its invoker hears: so many frames."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(GIVE_UP_S)
    sender, invoker = Sender(BlockingWire(ours), lambda: Heartbeat(running=0)), BlockingWire(theirs)
    sender.start()

    def told(count: int) -> list[Frame]:
        frames: list[Frame] = []
        while len(frames) < count:
            payload = invoker.receive()
            assert payload is not None
            body = codec.unpack(FromWorker, payload).body
            if isinstance(body, CallFrames):
                frames += (frame for _, items in body.items for frame in items)
        return frames

    yield sender, told
    sender.close(GIVE_UP_S)
    ours.close()
    invoker.close()


def head_of(**fields: Any) -> CallHead:
    given = {"body_bytes": 2, "credit": limits.WINDOW, **fields}
    return CallHead(
        call="c", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True, timeout_s=GIVE_UP_S,
        idle_timeout_s=GIVE_UP_S, seed=0, **given,
    )  # fmt: skip


def error_of(frame: Frame) -> ErrorBody:
    assert frame.kind is FrameKind.END
    error = codec.unpack(End, frame.data).error
    assert error is not None
    return error


async def test_credit_is_used_to_its_last_byte_and_never_taken_back(ends: tuple[Sender, Told]) -> None:
    """Whichever comes last, repeated or late."""
    out = Outgoing(1, ends[0], 10 + COST)
    assert not out.try_send(OUTPUT, bytes(11))
    assert out.try_send(OUTPUT, bytes(10))
    assert not out.try_send(OUTPUT, b"")
    out.grant(10 + COST + 5 + COST)
    out.grant(10)
    assert out.try_send(OUTPUT, bytes(5))
    assert [len(frame.data) for frame in ends[1](2)] == [10, 5]


async def test_after_its_end_nothing_is_sent(ends: tuple[Sender, Told]) -> None:
    sender, told = ends
    out, other = Outgoing(1, sender, limits.WINDOW), Outgoing(2, sender, limits.WINDOW)
    out.end(End())
    out.end(End(error=FIRST))
    assert not out.try_send(OUTPUT, b"1")
    with pytest.raises(CallEnded):
        out.send(OUTPUT, b"1", 0.0)
    other.end(End())
    assert [(frame.index, frame.kind) for frame in told(2)] == [(0, FrameKind.END)] * 2


async def test_of_what_a_call_is_cancelled_for_the_first_reason_holds(ends: tuple[Sender, Told]) -> None:
    out = Outgoing(1, ends[0], limits.WINDOW)
    out.cancel(FIRST)
    out.cancel(Cancelled("another one").body())
    assert out.cancelled == FIRST
    assert not out.try_send(OUTPUT, b"1")
    for act in (out.check, lambda: out.send(OUTPUT, b"1", 0.0)):
        with pytest.raises(CallEnded, match="the first reason"):
            act()


async def test_who_waits_for_credit_does_not_wait_for_ever(ends: tuple[Sender, Told]) -> None:
    out = Outgoing(1, ends[0], 0)
    with pytest.raises(CallEnded, match="nobody took"):
        out.send(OUTPUT, b"1", 0.01)
    async with asyncio.timeout(GIVE_UP_S):
        with pytest.raises(CallEnded):
            await out.asend(OUTPUT, b"1", 0.01)


async def test_ids_that_there_is_no_credit_for_are_told_with_the_next_ones(ends: tuple[Sender, Told]) -> None:
    out = Outgoing(1, ends[0], 0)
    recorder = IdRecorder(Call(1, head_of(follow=True), out), 0)
    recorder.add((1, 2), last=False)
    out.grant(limits.WINDOW)
    recorder.add((3,), last=True)
    (frame,) = ends[1](1)
    assert codec.unpack(Ids, frame.data) == Ids(0, 0, (1, 2, 3), ended=True, cached=0)


async def test_what_is_to_stop_with_a_call_that_was_cancelled_stops_at_once(ends: tuple[Sender, Told]) -> None:
    call = Call(1, head_of(), Outgoing(1, ends[0], 0))
    told: list[SllmError] = []
    call.cancel(FIRST)
    call.on_cancel(told.append)()
    assert [error.message for error in told] == ["the first reason"]


class Running:
    """The calls of an instance; each that begins waits for its cancel."""

    def __init__(self, sender: Sender) -> None:
        sender.watch(asyncio.get_running_loop())
        self.begun = 0
        self.calls = Calls(sender, Console(lambda *said: None, lambda: None), self._run, on_loop=True)

    async def _run(self, call: Call) -> None:
        self.begun += 1
        await asyncio.Event().wait()

    def start(self, number: int = 1, body: bytes = b"{}", **fields: Any) -> None:
        self.calls.start(StartCall(number=number, head=head_of(**fields), body=body))


@pytest.mark.parametrize("body", [b"{}", b"{"], ids=["it was to begin", "its body is not whole"])
async def test_a_call_that_is_cancelled_before_it_begins_ends(ends: tuple[Sender, Told], body: bytes) -> None:
    sender, told = ends
    running = Running(sender)
    running.start(body=body)
    running.calls.cancel(CancelCall(1, "deadline_exceeded", "too late"))
    (end,) = await asyncio.to_thread(told, 1)
    assert (error_of(end).code, error_of(end).message) == ("deadline_exceeded", "too late")
    assert (running.calls.count(), running.begun) == (0, 0)


async def test_an_instance_that_stops_begins_no_call(ends: tuple[Sender, Told]) -> None:
    sender, told = ends
    running = Running(sender)
    await running.calls.drain(GIVE_UP_S)
    running.start()
    (end,) = await asyncio.to_thread(told, 1)
    assert error_of(end).code == "draining"
    assert (running.calls.count(), running.begun) == (0, 0)


async def test_a_body_beyond_what_its_head_names_ends_its_call(ends: tuple[Sender, Told]) -> None:
    sender, told = ends
    running = Running(sender)
    running.start(body=bytes(10), body_bytes=12)
    assert running.calls.count() == 1
    running.calls.body(CallBody(1, b"123"))
    (end,) = await asyncio.to_thread(told, 1)
    assert error_of(end).code == "body_too_large"
    assert (running.calls.count(), running.begun) == (0, 0)


async def test_how_large_a_body_may_be_is_its_gateways_to_say(
    ends: tuple[Sender, Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``SLLM_MAX_BODY`` may be more than what it is unless it is set."""
    monkeypatch.setattr(limits, "MAX_BODY", 10)
    sender, told = ends
    running = Running(sender)
    running.start(body=bytes(10), body_bytes=12)
    running.calls.body(CallBody(1, b"12"))
    assert running.calls.count() == 1
    await until(lambda: running.begun == 1)
    running.calls.cancel(CancelCall(1, "cancelled", "enough"))
    (end,) = await asyncio.to_thread(told, 1)
    assert error_of(end).code == "cancelled"


async def test_a_call_that_is_told_other_ids_than_it_has_ends(ends: tuple[Sender, Told]) -> None:
    sender, told = ends
    running = Running(sender)
    running.start(recorded=((1, 2),))
    running.calls.feed(FeedCall(1, 0, 0, (1, 2, 3), False, False))
    await asyncio.sleep(0)
    assert running.calls.count() == 1
    running.calls.feed(FeedCall(1, 0, 2, (4,), False, False))
    (end,) = await asyncio.to_thread(told, 1)
    assert error_of(end).code == "not_deterministic"
