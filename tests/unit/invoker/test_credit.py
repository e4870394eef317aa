"""Credit on its way through a node: a worker is told seldom, and is never left waiting for credit that is there."""

from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_invoker.call import Call
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.frames import CallHead, Frame, FrameKind
from sllm_runtime.protocol.stream import Inbox

SMALLEST = 2 * limits.MAX_PART
"""The smallest window a gateway can be set to."""


def call_of(window: int) -> Call:
    head = CallHead(
        call="call-1", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True,
        body_bytes=0, timeout_s=60.0, idle_timeout_s=60.0, seed=0, credit=window,
    )  # fmt: skip
    return Call(1, "gw", head, 0.0)


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.lists(st.sampled_from([0, 1, 30, 5000, limits.MAX_PART - 1, limits.MAX_PART]), max_size=60),
    window=st.sampled_from([SMALLEST, limits.WINDOW]),
    lost=st.integers(0, 5),
)
def test_every_frame_gets_through_however_large(sizes: list[int], window: int, lost: int) -> None:
    call, inbox = call_of(window), Inbox(window)
    credit, made, sent, told, now = window, 0, 0, 0, 0.0
    for _ in range(10 * (len(sizes) + lost + 1)):
        now += limits.ACK_AFTER_S
        while made < len(sizes) and sent + sizes[made] + limits.FRAME_COST <= credit:
            frame = Frame(made, FrameKind.OUTPUT, bytes(sizes[made]))
            call.push([frame], now)
            made, sent = made + 1, sent + frame.cost
        while frames := call.take(limits.BATCH_BYTES, now):
            inbox.consume(sum(frame.cost for frame in inbox.on_frames(frames, now)))
        inbox.on_beat(call.sent, now)
        if (ack := inbox.ack(now + limits.ACK_AFTER_S)) is not None:
            if lost:
                lost -= 1
                continue
            call.on_ack(*ack, now)
            if (limit := call.new_credit()) is not None:
                credit, told = limit, told + 1
    assert (inbox.next_index, call.outbox.acked) == (len(sizes), len(sizes))
    assert told <= 4 * sent / window + 1


def test_small_frames_are_not_worth_a_message_each() -> None:
    call = call_of(limits.WINDOW)
    for index in range(100):
        call.push([Frame(index, FrameKind.OUTPUT, b"token")], 0.0)
        call.take(limits.BATCH_BYTES, 0.0)
        assert call.on_ack(index + 1, limits.WINDOW + call.outbox.pushed_bytes, 0.0)
        assert call.new_credit() is None
