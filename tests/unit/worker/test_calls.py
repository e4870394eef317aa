"""A worker that stops, and what it still waits for; what it is told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from sllm_runtime.platform.owned import end
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol.errors import ErrorBody, InstanceLost, SllmError
from sllm_runtime.protocol.frames import CallHead
from sllm_runtime.protocol.worker import CancelCall, Credit, Heartbeat, HoldCall, StartCall
from sllm_runtime.worker import calls
from sllm_runtime.worker.call import Call
from sllm_runtime.worker.calls import Calls
from sllm_runtime.worker.console import Console
from sllm_runtime.worker.main import Worker
from sllm_runtime.worker.sender import Sender
from tests.fixtures.waiting import GIVE_UP_S, until


@pytest.fixture
def sender() -> Iterator[Sender]:
    ours, theirs = socket.socketpair()
    made = Sender(BlockingWire(ours), lambda: Heartbeat(running=0))
    made.start()
    yield made
    made.close(GIVE_UP_S)
    ours.close()
    theirs.close()


def running(sender: Sender, body: bytes = b"{}") -> Calls:
    """One call, number 1, that ends when it is cancelled."""

    async def run(call: Call) -> None:
        await asyncio.Event().wait()

    sender.watch(asyncio.get_running_loop())
    made = Calls(sender, Console(lambda *said: None, lambda: None), run, on_loop=True)
    head = CallHead(
        call="c", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True, body_bytes=2,
        timeout_s=GIVE_UP_S, idle_timeout_s=GIVE_UP_S, seed=0,
    )  # fmt: skip
    made.start(StartCall(number=1, head=head, body=body))
    return made


@pytest.mark.parametrize("moves", [True, False])
async def test_it_ends_a_moment_after_its_last_call_has_moved_away(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    monkeypatch.setattr(calls, "_STAND_BY_S", 10 * GIVE_UP_S)
    made = running(sender)
    if moves:
        made.hold(HoldCall(1))
    stopping = asyncio.create_task(made.drain(GIVE_UP_S))
    try:
        made.cancel(CancelCall(1))
        await until(lambda: not made.count(), what="the call has ended")
        if moves:
            for _ in range(100):
                await asyncio.sleep(0)
            assert not stopping.done()
        else:
            await until(stopping.done, what="nothing is waited for")
    finally:
        await end([stopping])


async def test_a_call_whose_body_is_not_whole_holds_up_no_stop(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it runs that could be deaf to its cancel."""
    monkeypatch.setattr(calls, "_CANCEL_S", 10 * GIVE_UP_S)
    made = running(sender, b"{")
    stopping = asyncio.create_task(made.drain(0.0))
    try:
        await until(stopping.done, what="it has stopped")
        assert made.count() == 0
    finally:
        await end([stopping])


@pytest.mark.parametrize("why", [None, InstanceLost("its weights did not come; call again")])
async def test_what_outlasts_an_instance_that_breaks_is_cancelled_by_nobody(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, why: SllmError | None
) -> None:
    ended = list[ErrorBody | None]()
    monkeypatch.setattr(Call, "end", lambda call, error: ended.append(error))
    made = running(sender)
    await made.drain(0.0, why)
    assert [error and error.code for error in ended] == ["instance_lost" if why else "cancelled"]


def test_a_message_that_fails_costs_none_of_those_that_come_with_it(caplog: pytest.LogCaptureFixture) -> None:
    class Heeding:
        def __init__(self) -> None:
            self.granted: list[Credit] = []

        def hold(self, _message: HoldCall) -> None:
            raise KeyError("a bug")

        credit = property(lambda self: self.granted.append)

    ours, theirs = socket.socketpair()
    with closing(ours), closing(theirs):
        worker, heeding = Worker(BlockingWire(ours)), Heeding()
        worker._calls = heeding  # type: ignore[assignment]
        messages: list[Any] = [Credit(1, 10), HoldCall(2), Credit(3, 30)]
        worker._dispatch(messages)
    assert [message.number for message in heeding.granted] == [1, 3]
    assert "HoldCall failed" in caplog.text


async def test_a_second_stop_that_comes_with_the_first_one_is_heard_as_well(sender: Sender) -> None:
    """User code held the loop while both came: they are read one after the other, before the drain begins."""
    worker, made = object.__new__(Worker), running(sender)
    worker._calls, worker._stop = made, asyncio.get_running_loop().create_future()
    worker._ended(100 * GIVE_UP_S)
    worker._ended(0.0)
    stopping = asyncio.create_task(made.drain(await worker._stop or 0.0))
    try:
        await until(stopping.done, 10, what="it has stopped")
    finally:
        await end([stopping])
