"""What time alone brings: a call is heard of at least once a second, by its frames or where there are none by beats;
one that is held and of which nothing is heard draws."""

import asyncio

from sllm_invoker.call import Call
from sllm_invoker.relay import HELD_S, KEEP_ENDED_S, Relay
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.frames import (
    Ack,
    Beat,
    CallHead,
    Feed,
    Frame,
    FrameKind,
    Hold,
    Open,
    Segment,
    ToGateway,
    ToNode,
    Unknown,
)
from tests.fixtures.waiting import until

TICK = limits.HEARTBEAT_S / 10


class Line:
    """A gateway's line that takes everything."""

    free = True

    def __init__(self) -> None:
        self.sent: list[ToGateway] = []

    def send_now(self, message: ToGateway) -> None:
        self.sent.append(message)

    async def send(self, message: ToGateway) -> None:
        self.sent.append(message)


class Instance:
    """It takes every call; frames are pushed by the test."""

    open_for_calls = free_slot = True
    holds = False

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.told: list[Feed] = []
        self.stopped: list[Call] = []

    def begin(self, call: Call, body: list[bytes]) -> None:
        self.calls.append(call)

    def feed(self, call: Call, body: list[bytes]) -> None: ...

    def credit(self, call: Call) -> None: ...

    def follow(self, call: Call, on: bool) -> None: ...

    def tell_ids(self, call: Call, item: Feed) -> None:
        self.told.append(item)

    def hold(self, call: Call, interval_s: float) -> None:
        self.stopped.append(call)

    def cancel(self, call: Call, code: str, reason: str) -> None: ...

    def next_number(self) -> int:
        return len(self.calls)


class Node:
    """A relay with calls, whose clock is the test's."""

    def __init__(self, calls: int, *, held: bool = False) -> None:
        self.now = 0.0
        self.line, self.instance, self.tasks = Line(), Instance(), Tasks("test")
        self.relay = Relay(lambda _: self.instance, lambda _: self.line, lambda: self.now, self.tasks)
        for number in range(calls):
            head = CallHead(
                call=f"call-{number}", epoch=1, instance="i", function="f", version=1, kind="fn", stream=True,
                body_bytes=0, timeout_s=60.0, idle_timeout_s=60.0, seed=0, credit=limits.WINDOW, held=held,
            )  # fmt: skip
            self.relay.open("gw", Open(head=head))

    async def later(self, seconds: float) -> None:
        """So much time passes, in ticks."""
        for _ in range(round(seconds / TICK)):
            await self.tick()

    async def tick(self, *speaking: int) -> list[list[Beat]]:
        """A tenth of a heartbeat passes, those calls send a frame; the beats of each message."""
        self.now += TICK
        for call in (self.instance.calls[number] for number in speaking):
            call.push([Frame(call.outbox.next_index, FrameKind.OUTPUT, b"1")], self.now)
            self.relay.ready(call)
        self.relay.tick()
        await asyncio.sleep(0)  # the end of the loop's turn
        found, self.line.sent = self.line.sent, []
        beats = [[item for item in message.items if isinstance(item, Beat)] for message in found]
        spoke = [item.call for message in found for item in message.items if isinstance(item, Segment)]
        assert spoke == [f"call-{number}" for number in speaking]
        return [each for each in beats if each]


async def test_a_call_whose_frames_come_has_no_beats_and_one_that_falls_silent_has() -> None:
    node = Node(calls=2)
    for _ in range(5):
        assert await node.tick(0) == []
    silent = [await node.tick(0) for _ in range(7)]
    beats = [beat for messages in silent for message in messages for beat in message]
    assert [(beat.call, beat.next_index) for beat in beats] == [("call-1", 0)]

    silent = [await node.tick() for _ in range(12)]
    beats = [beat for messages in silent for message in messages for beat in message]
    assert ("call-0", 12) in [(beat.call, beat.next_index) for beat in beats]
    await node.tasks.close()


async def test_calls_that_are_silent_soon_beat_in_one_message() -> None:
    node = Node(calls=20)
    for number in range(5):  # each falls silent at another time
        await node.tick(*range(number * 4, 20))
    said = [messages for _ in range(30) if (messages := await node.tick())]
    assert 2 <= len(said) <= 4
    assert all(len(messages) == 1 and len(messages[0]) == 20 for messages in said)
    await node.tasks.close()


async def test_a_call_that_its_gateway_never_lets_draw_draws() -> None:
    """So that nothing stays for its whole timeout of a gateway that is no more."""
    node = Node(calls=2, held=True)
    node.instance.holds = True
    first, second = node.instance.calls
    await node.later(HELD_S / 2)
    node.relay.on_message("gw", ToNode((Feed("call-0", 1, 0, 0, (5,), True),)))
    await node.later(HELD_S / 2 + 2 * TICK)
    assert [(item.call, item.held) for item in node.instance.told] == [("call-0", True), ("call-1", False)]
    await node.later(HELD_S / 2)
    assert [(item.call, item.held) for item in node.instance.told][2:] == [("call-0", False)]
    assert [call.held for call in (first, second)] == [False, False]
    await node.tasks.close()


async def test_a_call_that_is_to_draw_no_more_draws_again_when_nobody_lets_it() -> None:
    """Its gateway is gone in the middle of a move: it ends as any call of such a gateway."""
    node = Node(calls=2)
    node.relay.on_message("gw", ToNode((Hold("call-0", 1),)))
    assert node.instance.stopped == [], "this instance cannot"
    node.instance.holds = True
    node.relay.on_message("gw", ToNode((Hold("call-1", 1),)))
    assert node.instance.stopped == [node.instance.calls[1]]
    await node.later(HELD_S + 2 * TICK)
    assert [(item.call, item.held) for item in node.instance.told] == [("call-1", False)]
    await node.tasks.close()


async def test_a_call_that_may_draw_is_told_so_once() -> None:
    node = Node(calls=1, held=True)
    node.instance.holds = True
    node.relay.on_message("gw", ToNode((Feed("call-0", 1, 0, 0, (5,)),)))
    await node.later(HELD_S * 1.5)
    assert node.instance.told == [Feed("call-0", 1, 0, 0, (5,))]
    await node.tasks.close()


async def test_a_link_to_a_gateway_that_is_no_more_goes() -> None:
    """Each life of a gateway may have another name."""
    node = Node(calls=1)
    for number in range(5):
        node.relay.on_message(f"gw-{number}", ToNode((Ack("nobody's", 1, 0, 0),)))
    node.relay.ready(node.instance.calls[0])
    await node.later(KEEP_ENDED_S)
    assert len(node.tasks) == 6
    await node.later(2 * TICK)
    await until(lambda: len(node.tasks) == 1, what="the one with a call is left")
    node.relay.on_message("gw-4", ToNode((Ack("nobody's", 1, 0, 0),)))
    await asyncio.sleep(0)
    assert [item for message in node.line.sent for item in message.items] == [Unknown("nobody's", 1)]
    await node.tasks.close()
