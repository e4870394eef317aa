"""What a gateway sends to nodes."""

import asyncio
from typing import Any, cast

import pytest

from sllm_gateway.calls import STOPPED
from sllm_gateway.link import OPEN_TRY_S, Link
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.outbox import encode
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import Cancelled, DeadlineExceeded, GatewayStopped, Unavailable
from sllm_runtime.protocol.frames import Ack, Cancel, Feed, Frame, FrameKind, Open, Opened, Parts
from sllm_runtime.protocol.limits import MOST_IDS
from sllm_runtime.protocol.subjects import node_calls


class Sent:
    """What a bus would be given to send."""

    def __init__(self) -> None:
        self.subjects: list[str] = []
        self.items = 0

    def publish_now(self, subject: str, message: Any) -> None:
        encode(message, subject)
        self.subjects.append(subject)
        self.items += len(message.items)


async def test_what_no_message_holds_keeps_nothing_from_other_nodes() -> None:
    sent = Sent()
    link = Link(cast(Bus, sent), "g1", lambda: 0.0)
    link.send("n1", Feed("call-1", 1, 0, 0, (2**40,) * MOST_IDS))
    link.send("n2", Ack("call-2", 1, 1, 0))
    await asyncio.sleep(0)
    assert sent.subjects == [node_calls("n2", "g1")]


@pytest.mark.parametrize(
    "item",
    [
        Cancel(f"call-{10**23}", 1, GatewayStopped(STOPPED).code, STOPPED),  # as of each that runs when a gateway stops
        Cancel(f"call-{10**23}", 1, "cancelled", "the caller went away"),
        Parts(f"call-{10**23}", 1, (Frame(1, FrameKind.BODY, b"{}"),)),
    ],
)
async def test_what_many_calls_owe_at_once_is_sent(item: Cancel | Parts) -> None:
    sent = Sent()
    link = Link(cast(Bus, sent), "g1", lambda: 0.0)
    link.send_all("n1", 12_000 * [item])
    await asyncio.sleep(0)
    assert sent.items == 12_000


async def test_what_one_message_does_not_hold_goes_in_two() -> None:
    sent = Sent()
    link = Link(cast(Bus, sent), "g1", lambda: 0.0)
    for generation in range(2):
        link.send("n1", Feed("call-1", 1, generation, 0, (2**31 - 1,) * MOST_IDS))
    await asyncio.sleep(0)
    assert sent.subjects == [node_calls("n1", "g1")] * 2


async def test_what_waits_is_sent_before_the_end() -> None:
    """Such as the cancellations of a gateway that stops."""
    sent = Sent()
    link = Link(cast(Bus, sent), "g1", lambda: 0.0)
    link.send("n1", Ack("call-1", 1, 1, 0))
    await link.close()
    assert sent.subjects == [node_calls("n1", "g1")]


class Away:
    """A bus whose server comes back while somebody waits to ask, and breaks off once more then."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.connected = False
        self.heard = 0

    def back(self) -> None:
        self.connected = True
        self.happened.append("back")

    async def call(self, subject: str, request: Open, reply: type, *, timeout_s: float) -> Opened:
        self.happened.append("asked")
        if self.happened.count("asked") == 1:
            self.connected = False
            asyncio.get_running_loop().call_soon(self.back)
            raise Unavailable("the connection broke")
        return Opened(status="accepted")


async def test_nothing_is_asked_without_a_connection_nor_after_it_before_it_is_known_to_be_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would come to the node late, when another gateway has the call."""
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.01)
    bus = Away()
    link = Link(cast(Bus, bus), "g1", lambda: 0.0)

    async def before() -> None:
        bus.happened.append("known")

    asyncio.get_running_loop().call_later(0.05, bus.back)
    opened = await link.open("n1", cast(Open, None), before)
    assert opened.status == "accepted"
    assert bus.happened == ["back", "known", "asked", "back", "known", "asked"]


async def test_time_without_a_connection_is_none_in_which_a_node_could_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was asked as the connection broke is asked again, however long that took."""
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.01)
    bus, now = Away(), 0.0
    bus.connected = True
    answers = bus.call

    async def call(*asked: Any, **how: Any) -> Opened:
        nonlocal now
        try:
            return await answers(*asked, **how)
        except Unavailable as error:
            now += 2 * limits.RPC_TIMEOUT_S
            raise DeadlineExceeded("no answer") from error

    bus.call = call  # type: ignore[method-assign]
    opened = await Link(cast(Bus, bus), "g1", lambda: now).open("n1", cast(Open, None))
    assert opened.status == "accepted"
    assert bus.happened == ["asked", "back", "asked"]


async def test_time_in_which_nothing_comes_from_nats_is_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that drops everything: the connection stands for 10 to 15 s more, and the node has heard of nothing."""
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 1e-6)
    bus, now, asked = Away(), 0.0, 0
    bus.connected = True

    def clock() -> float:
        nonlocal now
        now += 0.05
        bus.heard += now > 12.0
        return now

    async def call(subject: str, request: Open, reply: type, *, timeout_s: float) -> Opened:
        nonlocal now, asked
        asked += 1
        if now > 12.0:
            return Opened(status="accepted")
        now += timeout_s
        raise DeadlineExceeded("no answer")

    bus.call = call  # type: ignore[method-assign]
    opened = await Link(cast(Bus, bus), "g1", clock).open("n1", cast(Open, None))
    assert opened.status == "accepted"
    assert asked <= 1 + limits.DEAF_S / OPEN_TRY_S + 1, "what is asked meanwhile would come all at once"


async def test_what_was_asked_as_the_connection_broke_may_have_been_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node is no more as NATS is back, nor soon after: asked elsewhere it might run twice."""
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.01)
    monkeypatch.setattr("sllm_gateway.link.SETTLE_S", 0.015)
    bus = Away()
    bus.connected = True
    breaks_off = bus.call

    async def call(*asked: Any, **how: Any) -> Opened:
        await breaks_off(*asked, **how)
        raise Unavailable("nobody is there")

    bus.call = call  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="nobody is there"):
        await Link(cast(Bus, bus), "g1", lambda: 0.0).open("n1", cast(Open, None))
    assert bus.happened == ["asked", "back", "asked", "asked"]


async def test_a_node_that_the_same_cut_off_may_be_back_a_little_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.01)
    bus = Away()
    bus.connected = True
    breaks_off = bus.call

    async def call(*asked: Any, **how: Any) -> Opened:
        opened = await breaks_off(*asked, **how)
        if bus.happened.count("asked") < 5:
            raise Unavailable("nobody is there")
        return opened

    bus.call = call  # type: ignore[method-assign]
    opened = await Link(cast(Bus, bus), "g1", lambda: 0.0).open("n1", cast(Open, None))
    assert opened.status == "accepted"


async def test_a_call_that_has_ended_is_not_asked_for_while_its_node_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its cancellation was sent to nobody: a node that is back would begin it."""
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.01)
    monkeypatch.setattr("sllm_gateway.link.SETTLE_S", 0.1)
    bus = Away()
    bus.connected = True
    breaks_off, over = bus.call, False

    async def call(*asked: Any, **how: Any) -> Opened:
        nonlocal over
        await breaks_off(*asked, **how)
        if bus.happened.count("asked") < 4:
            over = True
            raise Unavailable("nobody is there")
        return Opened(status="accepted")

    async def before() -> None:
        if over:
            raise Cancelled("it has ended meanwhile")

    bus.call = call  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        await Link(cast(Bus, bus), "g1", lambda: 0.0).open("n1", cast(Open, None), before)
    assert bus.happened == ["asked", "back", "asked"]


async def test_what_broke_and_was_made_anew_within_one_try_cut_its_node_off_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is restarted within a second: each comes back at a time of its own, and a question that was on its
    way ends as one that has no answer."""
    monkeypatch.setattr(limits, "RESEND_AFTER_S", 0.01)

    class Restarted(Away):
        async def listen(self, *_: Any) -> None:
            self.connected = True

        def on_reconnect(self, callback: Any) -> None:
            self.callbacks = [*getattr(self, "callbacks", []), callback]

        async def call(self, subject: str, request: Open, reply: type, *, timeout_s: float) -> Opened:
            self.happened.append("asked")
            if len(self.happened) == 1:
                for callback in self.callbacks:
                    callback()
                raise DeadlineExceeded("no answer")
            if len(self.happened) == 2:
                raise Unavailable("nobody is there")
            return Opened(status="accepted")

    bus = Restarted()
    link = Link(cast(Bus, bus), "g1", lambda: 0.0)
    await link.start(cast(Any, type("", (), {"on_items": None, "on_reconnect": lambda _: None})()))
    assert (await link.open("n1", cast(Open, None))).status == "accepted"
