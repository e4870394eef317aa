"""What goes to a gateway: small enough messages, every frame once and in order, no call kept from its turn."""

import asyncio
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_invoker import gateway_link
from sllm_invoker.call import Call
from sllm_invoker.gateway_link import MAX_ITEMS, GatewayLink
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.frames import Beat, CallHead, Frame, FrameKind, Segment, ToGateway
from tests.fixtures.waiting import until


def a_call(number: int, credit: int = 64 * limits.MIB) -> Call:
    head = CallHead(
        call=f"call-{number:032d}", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True,
        body_bytes=0, timeout_s=60.0, idle_timeout_s=60.0, seed=0, credit=credit,
    )  # fmt: skip
    return Call(number, "gw", head, 0.0)


class Line:
    """A gateway's line that takes messages while it is ``free``; ``send`` waits until it is."""

    def __init__(self) -> None:
        self.sent: list[ToGateway] = []
        self.opened = asyncio.Event()
        self.opened.set()

    @property
    def free(self) -> bool:
        return self.opened.is_set()

    def send_now(self, message: ToGateway) -> None:
        self.sent.append(message)

    async def send(self, message: ToGateway) -> None:
        await self.opened.wait()
        self.sent.append(message)


def a_link(line: Line | None = None, *, soon: bool = False) -> GatewayLink:
    """``soon``: it sends by itself at the end of a tick."""
    call_soon = asyncio.get_running_loop().call_soon if soon else lambda _flush: None
    return GatewayLink("gw", line or Line(), lambda: 0.0, call_soon)


sizes = st.lists(st.sampled_from([0, 1, 30, 5000, limits.MAX_PART - 1, limits.MAX_PART]), max_size=12)


@settings(deadline=None, max_examples=50)
@given(outputs=st.lists(sizes, min_size=1, max_size=6), beats=st.integers(0, 3000))
def test_messages_are_below_the_limit_and_lose_nothing(outputs: list[list[int]], beats: int) -> None:
    link = a_link()
    calls = [a_call(number) for number in range(len(outputs))]
    for call, lengths in zip(calls, outputs, strict=True):
        call.push([Frame(index, FrameKind.OUTPUT, bytes(size)) for index, size in enumerate(lengths)], 0.0)
        link.dirty(call)
    for number in range(beats):
        link.note(Beat(f"beat-{number:032d}", 1, number))
    got: dict[str, list[Frame]] = defaultdict(list)
    heard = 0
    while (message := link.collect()) is not None:
        assert len(codec.pack(message)) <= limits.MAX_MESSAGE
        for item in message.items:
            if isinstance(item, Segment):
                got[item.call] += item.frames
            else:
                heard += 1
    assert heard == beats
    for call, lengths in zip(calls, outputs, strict=True):
        assert [(frame.index, len(frame.data)) for frame in got[call.head.call]] == list(enumerate(lengths))


def test_a_small_call_does_not_wait_for_a_large_one() -> None:
    link = a_link()
    large, small = a_call(1), a_call(2)
    large.push([Frame(index, FrameKind.OUTPUT, bytes(limits.MAX_PART)) for index in range(8)], 0.0)
    small.push([Frame(0, FrameKind.OUTPUT, b"x")], 0.0)
    link.dirty(large)
    link.dirty(small)
    first, second = link.collect(), link.collect()
    assert first is not None
    assert second is not None
    calls = [item.call for message in (first, second) for item in message.items]
    assert small.head.call in calls


def test_what_credit_holds_back_is_sent_when_it_comes() -> None:
    link = a_link()
    call = a_call(1, credit=10 + limits.FRAME_COST)
    call.push([Frame(0, FrameKind.OUTPUT, bytes(8)), Frame(1, FrameKind.OUTPUT, bytes(8))], 0.0)
    link.dirty(call)
    message = link.collect()
    assert message is not None
    assert link.collect() is None
    assert call.on_ack(1, 1000, 0.0)
    link.dirty(call)
    message = link.collect()
    assert message is not None
    (segment,) = message.items
    assert isinstance(segment, Segment)
    assert [frame.index for frame in segment.frames] == [1]


def ready(link: GatewayLink, numbers: range) -> None:
    for number in numbers:
        call = a_call(number)
        call.push([Frame(0, FrameKind.OUTPUT, b"token")], 0.0)
        link.dirty(call)


async def test_all_that_is_ready_in_one_tick_is_one_message() -> None:
    line = Line()
    link = a_link(line, soon=True)
    ready(link, range(10))
    assert line.sent == []
    await asyncio.sleep(0)
    assert [len(message.items) for message in line.sent] == [10]


async def test_what_a_full_line_does_not_take_is_sent_when_it_does() -> None:
    line = Line()
    link = a_link(line, soon=True)
    task = asyncio.create_task(link.run())
    line.opened.clear()
    ready(link, range(3))
    await asyncio.sleep(0)
    link.note(Beat("beat", 1, 7))
    await asyncio.sleep(0)
    assert line.sent == []
    line.opened.set()
    await until(lambda: sum(len(message.items) for message in line.sent) == 4)
    ready(link, range(3, 5))
    await until(lambda: sum(len(message.items) for message in line.sent) == 6)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_nothing_is_sent_while_the_bus_is_away() -> None:
    line = Line()
    link = a_link(line, soon=True)
    task = asyncio.create_task(link.run())
    line.opened.clear()
    link.connected.clear()
    ready(link, range(3))
    await asyncio.sleep(0)
    line.opened.set()
    await asyncio.sleep(0)
    assert line.sent == []
    link.connected.set()
    await until(lambda: [len(message.items) for message in line.sent] == [3])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def test_notes_and_frames_are_together_below_the_limit() -> None:
    link, call = a_link(), a_call(1)
    call.push([Frame(index, FrameKind.OUTPUT, bytes(1000)) for index in range(1000)], 0.0)
    link.dirty(call)
    for number in range(MAX_ITEMS):
        link.note(Beat(f"beat-{number:032d}", 1, number))
    while (message := link.collect()) is not None:
        assert len(codec.pack(message)) <= limits.MAX_MESSAGE


def test_notes_for_a_line_that_takes_none_are_bounded() -> None:
    """Each is repeated until it has had its effect: the last ones count."""
    link = a_link()
    for number in range(5 * MAX_ITEMS):
        link.note(Beat("beat", 1, number))
    said = list[int]()
    while (message := link.collect()) is not None:
        said += [item.next_index for item in message.items if isinstance(item, Beat)]
    assert said == list(range(MAX_ITEMS, 5 * MAX_ITEMS))


@pytest.mark.parametrize("free", [True, False], ids=["at once", "later"])
async def test_a_message_that_the_bus_refuses_costs_none_of_the_next(
    monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    """Its frames are kept, and asked for again."""

    class Refusing(Line):
        refused = 0

        def send_now(self, message: ToGateway) -> None:
            self.refuse()
            super().send_now(message)

        async def send(self, message: ToGateway) -> None:
            await self.opened.wait()
            self.refuse()
            await super().send(message)

        def refuse(self) -> None:
            if not self.refused:
                self.refused += 1
                raise Unavailable("the bus is away")

    monkeypatch.setattr(gateway_link, "RETRY_S", 0.0)
    line = Refusing()
    link = a_link(line, soon=True)
    task = asyncio.create_task(link.run())
    if not free:
        line.opened.clear()
    first, second = a_call(1), a_call(2)
    for call in (first, second):
        call.push([Frame(0, FrameKind.OUTPUT, bytes(limits.MAX_PART))], 0.0)
        link.dirty(call)
    await asyncio.sleep(0)
    line.opened.set()
    await until(lambda: line.sent, what="the other one is sent")
    first.outbox.on_resend(0)
    link.dirty(first)
    await until(lambda: len(line.sent) == 2, what="it is sent again")
    segments = [item for message in line.sent for item in message.items if isinstance(item, Segment)]
    assert [segment.call for segment in segments] == [second.head.call, first.head.call]
    assert [len(segment.frames) for segment in segments] == [1, 1]
    assert not task.done()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
