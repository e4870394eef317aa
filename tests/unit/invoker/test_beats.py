"""What time alone brings: a call is heard of at least once a second, by its frames or where there are none by beats;
one that is held and of which nothing is heard draws."""

import asyncio

import pytest

from sllm_invoker import relay
from sllm_invoker.call import Call
from sllm_invoker.relay import DEADLINE_SLACK_S, HELD_S, KEEP_ENDED_S, REMEMBER_S, Relay
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import codec, limits
from sllm_runtime.protocol.frames import (
    Ack,
    Beat,
    CallHead,
    Cancel,
    End,
    Feed,
    Frame,
    FrameKind,
    Hold,
    Open,
    Parts,
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
        self.cancelled: list[tuple[str, str]] = []

    def begin(self, call: Call, body: list[bytes]) -> None:
        self.calls.append(call)

    def feed(self, call: Call, body: list[bytes]) -> None: ...

    def credit(self, call: Call) -> None: ...

    def follow(self, call: Call, on: bool) -> None: ...

    def tell_ids(self, call: Call, item: Feed) -> None:
        self.told.append(item)

    def hold(self, call: Call, interval_s: float) -> None:
        self.stopped.append(call)

    def cancel(self, call: Call, code: str, reason: str) -> None:
        call.cancel = code, reason
        self.cancelled.append((call.head.call, code))

    def next_number(self) -> int:
        return len(self.calls)


class Node:
    """A relay with calls, whose clock is the test's."""

    def __init__(self, calls: int, *, held: bool = False) -> None:
        self.now = 0.0
        self.line, self.instance, self.tasks = Line(), Instance(), Tasks("test")
        self.relay = Relay(lambda _: self.instance, lambda _: self.line, lambda: self.now, self.tasks)
        for number in range(calls):
            self.open(f"call-{number}", held=held)

    def open(self, call: str, gateway: str = "gw", *, held: bool = False, body_bytes: int = 0) -> str:
        """What its gateway is told: the answer's status."""
        head = CallHead(
            call=call, epoch=1, instance="i", function="f", version=1, kind="fn", stream=True,
            body_bytes=body_bytes, timeout_s=60.0, idle_timeout_s=60.0, seed=0, credit=limits.WINDOW, held=held,
        )  # fmt: skip
        return self.relay.open(gateway, Open(head=head)).status

    async def push(self, number: int, kind: FrameKind = FrameKind.OUTPUT) -> None:
        """That call has one more frame, which leaves if it can."""
        call = self.instance.calls[number]
        call.push([Frame(call.outbox.next_index, kind, codec.pack(End()) if kind is FrameKind.END else b"1")], self.now)
        self.relay.ready(call)
        await asyncio.sleep(0)

    def ack(self, number: int, next_index: int) -> None:
        """Its gateway has so many frames of that call."""
        self.relay.on_message("gw", ToNode((Ack(f"call-{number}", 1, next_index, limits.WINDOW),)))

    @property
    def said(self) -> list[object]:
        """What has left since it was last asked for."""
        found, self.line.sent = self.line.sent, []
        return [item for message in found for item in message.items]

    async def later(self, seconds: float) -> None:
        """So much time passes, in ticks; what had left before is forgotten."""
        self.line.sent = []
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


async def test_a_call_that_no_gateway_could_let_draw_does_not() -> None:
    """Its gateway cannot be heard while the bus is away: what it draws then nobody has asked for."""
    node = Node(calls=1, held=True)
    node.instance.holds = True
    node.relay.on_disconnect()
    await node.later(HELD_S + 3 * TICK)
    node.relay.on_reconnect()
    await node.later(HELD_S - TICK)
    assert node.instance.told == []
    await node.later(3 * TICK)
    assert [item.call for item in node.instance.told] == ["call-0"]
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


async def test_a_call_of_a_gateway_that_is_no_more_ends_at_its_deadline() -> None:
    """The gateway ends it, and has a moment for that."""
    node = Node(calls=1)
    await node.later(60.0 + DEADLINE_SLACK_S - TICK)
    assert node.instance.cancelled == []
    await node.later(3 * TICK)
    assert node.instance.cancelled == [("call-0", "deadline_exceeded")]
    await node.tasks.close()


async def test_an_end_that_nobody_acknowledges_is_not_kept_for_ever() -> None:
    node = Node(calls=2)
    for number in range(2):
        await node.push(number, FrameKind.END)
    assert node.said
    node.ack(0, 1)
    assert node.relay.calls == 1, "nothing is kept of one that its gateway has"
    await node.later(KEEP_ENDED_S - TICK)
    assert node.relay.calls == 1
    await node.later(3 * TICK)
    assert node.relay.calls == 0
    assert node.open("call-1") == "accepted"
    assert len(node.instance.calls) == 2, "it is over, and does not run again"
    await node.tasks.close()


@pytest.mark.parametrize("bus", [True, False], ids=["bus", "process"])
async def test_an_end_that_nobody_could_acknowledge_is_kept(bus: bool) -> None:
    """Its gateway has the call still, and asks for what it has missed."""
    node = Node(calls=1)
    if bus:
        node.relay.on_disconnect()
    await node.push(0, FrameKind.END)
    if bus:
        await node.later(2 * KEEP_ENDED_S)
        node.relay.on_reconnect()
    else:
        node.now += 2 * KEEP_ENDED_S
        node.relay.tick()
    assert node.relay.calls == 1
    await node.later(KEEP_ENDED_S - 2 * TICK)
    assert node.relay.calls == 1
    await node.later(4 * TICK)
    assert node.relay.calls == 0
    await node.tasks.close()


async def test_a_gateway_that_acknowledges_no_more_loses_its_call() -> None:
    node = Node(calls=1)
    for _ in range(2):
        await node.push(0)
    node.ack(0, 1)
    await node.later(limits.LOST_AFTER_S)
    assert node.instance.cancelled == []
    await node.later(2 * TICK)
    assert node.instance.cancelled == [("call-0", "gateway_silent")]
    await node.tasks.close()


async def test_a_gateway_that_is_always_a_frame_behind_keeps_its_call() -> None:
    node = Node(calls=1)
    await node.push(0)
    for count in range(1, round(2 * limits.LOST_AFTER_S)):
        await node.push(0)
        node.ack(0, count)
        await node.later(1.0)
    assert node.instance.cancelled == []
    assert node.relay.overdue() == set()
    await node.tasks.close()


@pytest.mark.parametrize("bus", [True, False], ids=["bus", "process"])
async def test_silence_that_has_another_reason_is_nobodys(bus: bool) -> None:
    """The bus was away, or this process did not run."""
    node = Node(calls=1)
    await node.push(0)
    if bus:
        node.relay.on_disconnect()
        await node.later(2 * limits.LOST_AFTER_S)
        node.relay.on_reconnect()
    else:
        node.now += 2 * limits.LOST_AFTER_S
        node.relay.tick()
    assert node.relay.overdue() == set()
    node.relay.on_left("gw")
    assert node.instance.cancelled == []
    await node.later(limits.LOST_AFTER_S)
    assert node.instance.cancelled == []
    assert node.relay.overdue() == {"gw"}
    await node.later(2 * TICK)
    assert node.instance.cancelled == [("call-0", "gateway_silent")]
    assert node.relay.overdue() == set(), "it has been judged"
    await node.tasks.close()


async def test_a_gateway_whose_word_is_recent_has_not_left() -> None:
    """NATS says so of a connection: it may have another one."""
    node = Node(calls=2)
    await node.later(2 * limits.OVERDUE_S)
    await node.push(0)
    node.ack(0, 1)
    node.relay.on_left("other")
    assert node.instance.cancelled == []
    node.relay.on_left("gw")
    assert node.instance.cancelled == [("call-1", "gateway_silent")]
    await node.tasks.close()


async def test_frames_wait_while_the_bus_is_away_and_gateways_are_told_how_far_calls_are() -> None:
    """Also one that nothing was sent to before."""
    node = Node(calls=1)
    node.open("call-1", "gw-2")
    await node.push(0)
    assert node.said
    node.line.free = False
    node.relay.on_disconnect()
    for number in range(2):
        await node.push(number)
    await asyncio.sleep(0)
    assert node.said == []
    node.relay.on_reconnect()
    await until(lambda: len(node.relay._senders) == 2 and len(node.line.sent) >= 2, what="both hear of it")
    said = node.said
    assert {item.call for item in said if isinstance(item, Segment)} == {"call-0", "call-1"}
    assert ("call-0", 1) in [(item.call, item.next_index) for item in said if isinstance(item, Beat)]
    await node.tasks.close()


async def test_a_call_is_its_own_gateways() -> None:
    node = Node(calls=1)
    await node.push(0)
    assert node.said
    node.relay.on_message("other", ToNode((Cancel("call-0", 1), Ack("call-0", 1, 1, 0), Hold("call-0", 1))))
    await asyncio.sleep(0)
    assert node.said == [Unknown("call-0", 1)] * 3
    assert node.instance.cancelled == []
    assert node.instance.calls[0].outbox.acked == 0
    await node.tasks.close()


async def test_a_gateway_that_breaks_the_protocol_loses_its_call_alone() -> None:
    node = Node(calls=1)
    node.open("call-1", body_bytes=1)
    parts = Parts("call-1", 1, (Frame(0, FrameKind.BODY, b"12"),))
    node.relay.on_message("gw", ToNode((parts, Cancel("call-0", 1))))
    assert node.instance.cancelled == [("call-1", "protocol_error"), ("call-0", "cancelled")]
    await node.tasks.close()


async def test_a_cancel_that_overtook_its_call_is_remembered_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more of them than there is room for."""
    monkeypatch.setattr(relay, "MAX_REMEMBERED", 2)
    node = Node(calls=0)
    node.relay.on_message("gw", ToNode(tuple(Cancel(f"call-{number}", 1) for number in range(3))))
    assert [node.open(f"call-{number}") for number in range(3)] == ["accepted", "busy", "busy"]
    await node.later(REMEMBER_S - TICK)
    assert node.open("call-2") == "busy"
    await node.later(3 * TICK)
    assert node.open("call-2") == "accepted"
    await node.tasks.close()
