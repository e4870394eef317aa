"""What a worker says of its calls goes on to gateways as far as it can be believed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from sllm_invoker.bounds import MAX_SPANS, MAX_TOKENS
from sllm_invoker.call import Call
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.clipping import MESSAGE_BYTES, NAME_BYTES
from sllm_runtime.protocol.errors import ErrorBody, InstanceLost, ProtocolError
from sllm_runtime.protocol.frames import CallHead, End, Frame, FrameKind, Ids, Usage
from sllm_runtime.protocol.timeline import Span


def a_call() -> Call:
    head = CallHead(
        call="call-1", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True,
        body_bytes=0, timeout_s=60.0, idle_timeout_s=60.0, seed=0, credit=limits.WINDOW,
    )  # fmt: skip
    return Call(1, "gw", head, 0.0)


def told(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """What its gateway hears of ``frames``."""
    call = a_call()
    call.push(frames, 0.0)
    return call.take(limits.BATCH_BYTES, 0.0)


def end_frame(end: End, index: int = 0) -> Frame:
    return Frame(index, FrameKind.END, codec.pack(end))


def test_an_end_is_told_as_it_is() -> None:
    error = ErrorBody(code="function_error", message="ValueError: no", status=500, retry_after_s=1.5)
    end = End(error=error, usage=Usage(5, MAX_TOKENS, 0), spans=(Span("first_token", 0.5, 1.0),))
    frames = (Frame(0, FrameKind.OUTPUT, b"1"), end_frame(end, 1))
    assert told(frames) == frames


def test_an_end_is_bounded() -> None:
    """A gateway keeps it, counts by its code, and answers with its status."""
    error = ErrorBody(code="c" * 90_000, message="m" * 90_000, status=-7, stage="s" * 9_000, retry_after_s=math.nan)
    (frame,) = told([end_frame(End(error=error, spans=(Span("n", 0.0, 1.0),) * 900, usage=Usage(1, 2)))])
    assert (frame.index, frame.kind, frame.more) == (0, FrameKind.END, False)
    end = codec.unpack(End, frame.data)
    assert end.usage == Usage(1, 2)
    assert len(end.spans) == MAX_SPANS
    assert end.error is not None
    assert (end.error.code, end.error.message) == ("c" * NAME_BYTES, "m" * MESSAGE_BYTES)
    assert (end.error.status, end.error.retry_after_s) == (500, None)


def test_a_worker_does_not_say_that_it_was_ended_in_order() -> None:
    """No death would count of a call that says so, and ends each instance that it comes to."""
    (frame,) = told([end_frame(End(error=InstanceLost("it died").body(), stopped=True))])
    assert not codec.unpack(End, frame.data).stopped


@pytest.mark.parametrize("usage", [Usage(-1, 0, 0), Usage(0, -1, 0), Usage(0, 0, -1), Usage(MAX_TOKENS + 1)])
def test_tokens_that_cannot_be_are_refused(usage: Usage) -> None:
    with pytest.raises(ProtocolError, match="cannot have used"):
        told([end_frame(End(usage=usage))])


@pytest.mark.parametrize("ids", [(0, -1), (limits.ID_END,), (2**63, 1)])
def test_ids_that_are_no_tokens_are_refused(ids: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match="are no tokens'"):
        told([Frame(0, FrameKind.IDS, codec.pack(Ids(0, 0, ids)))])


def test_ids_are_told_as_they_are() -> None:
    made = (Ids(0, 0, (0, limits.ID_END - 1)), Ids(0, 2, (), ended=True))
    frames = tuple(Frame(index, FrameKind.IDS, codec.pack(ids)) for index, ids in enumerate(made))
    assert told(frames) == frames


def test_a_frame_behind_an_end_is_refused() -> None:
    with pytest.raises(ProtocolError, match="after the end"):
        told([end_frame(End()), end_frame(End(), 1)])


def test_an_end_with_frames_behind_it_is_none() -> None:
    """It was told as it was, and the call counted as ended well."""
    call = a_call()
    with pytest.raises(ProtocolError, match="after the end"):
        call.push([end_frame(End(usage=Usage(-5))), Frame(1, FrameKind.OUTPUT, b"1")], 0.0)
    call.fail(InstanceLost("it breaks the protocol").body(), 1.0)
    (frame,) = call.take(limits.BATCH_BYTES, 1.0)
    error = codec.unpack(End, frame.data).error
    assert error is not None
    assert (error.code, call.ended_at) == ("instance_lost", 1.0)


def test_what_was_sent_once_is_sent_whatever_is_asked_for_again() -> None:
    """A beat says so much of it: with less a gateway would not miss what was lost."""
    call = a_call()
    call.push([Frame(index, FrameKind.OUTPUT, bytes(100)) for index in range(3)], 0.0)
    assert len(call.take(limits.BATCH_BYTES, 0.0)) == 3
    call.outbox.on_resend(0)
    assert len(call.take(1, 0.0)) == 1
    assert call.sent == 3
