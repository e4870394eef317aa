"""What leaves a worker, and what cannot."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import StartFailed
from sllm_runtime.protocol.frames import End, Frame, FrameKind
from sllm_runtime.protocol.worker import CallFrames, Failed, FromWorker, Heartbeat, Log
from sllm_runtime.worker.sender import Sender
from tests.fixtures.waiting import GIVE_UP_S


@pytest.fixture
def ends() -> Iterator[tuple[Sender, BlockingWire]]:
    """One that is not started yet, and its invoker's end."""
    ours, theirs = socket.socketpair()
    theirs.settimeout(GIVE_UP_S)
    invoker = BlockingWire(theirs)
    sender = Sender(BlockingWire(ours), lambda: Heartbeat(running=0))
    yield sender, invoker
    ours.close()
    invoker.close()


def heard(invoker: BlockingWire) -> object:
    while True:
        payload = invoker.receive()
        assert payload is not None
        body = codec.unpack(FromWorker, payload).body
        if not isinstance(body, Heartbeat):
            return body


def test_a_frame_that_fits_in_no_message_ends_its_call_alone(ends: tuple[Sender, BlockingWire]) -> None:
    sender, invoker = ends
    other = Frame(0, FrameKind.OUTPUT, b"1")
    sender.queue(1, Frame(5, FrameKind.END, b"x" * limits.MAX_MESSAGE))
    sender.queue(2, other)
    sender.start()
    ended, told = heard(invoker), heard(invoker)
    assert isinstance(ended, CallFrames)
    ((number, (frame,)),) = ended.items
    assert (number, frame.index, frame.kind) == (1, 5, FrameKind.END)
    error = codec.unpack(End, frame.data).error
    assert error is not None
    assert error.code == "protocol_error"
    assert told == CallFrames(((2, (other,)),))
    sender.close(GIVE_UP_S)


@pytest.mark.parametrize("text", ["x" * limits.MAX_MESSAGE, "\ud800"])
def test_another_message_that_cannot_be_sent_is_told_of(ends: tuple[Sender, BlockingWire], text: str) -> None:
    sender, invoker = ends
    sender.start()
    sender.send(Failed(error=StartFailed(text).body()))
    said = heard(invoker)
    assert isinstance(said, Log)
    assert said.text.startswith("Failed of this worker cannot be sent")
    sender.log(None, "stdout", "goes on")
    assert heard(invoker) == Log(number=None, stream="stdout", text="goes on", level="info")
    sender.close(GIVE_UP_S)
