"""The reliable stream over a network that loses, repeats and re-orders; every schedule is Hypothesis'."""

from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.frames import Frame, FrameKind
from sllm_runtime.protocol.stream import Inbox, Outbox
from tests.fixtures.examples import examples

STEP_S = 0.05
COST = limits.FRAME_COST
WINDOW = 1000
"""Small, so that credit runs out all the time."""
MOST_STEPS = 20_000


@dataclass
class Network:
    """Both directions between one outbox and one inbox."""

    random: Random
    loss: float
    repeat: float
    delay: int
    now: int = 0
    flying: list[tuple[int, Any]] = field(default_factory=list)

    def send(self, message: Any) -> None:
        copies = 0 if self.random.random() < self.loss else 2 if self.random.random() < self.repeat else 1
        for _ in range(copies):
            self.flying.append((self.now + self.random.randint(1, self.delay), message))

    def arrived(self) -> list[Any]:
        self.now += 1
        here = [message for at, message in self.flying if at <= self.now]
        self.flying = [(at, message) for at, message in self.flying if at > self.now]
        self.random.shuffle(here)
        return here


@dataclass
class Pair:
    """A sender that makes frames when credit lets it, a reader that reads now and then."""

    sizes: list[int]
    random: Random
    network: Network
    reads: float
    outbox: Outbox = field(default_factory=lambda: Outbox(WINDOW))
    inbox: Inbox = field(default_factory=lambda: Inbox(WINDOW))
    got: list[Frame] = field(default_factory=list)
    unread: int = 0
    time: float = 0.0

    def run(self) -> None:
        """Until the end frame is here and acknowledged."""
        for step in range(MOST_STEPS):
            self.time += STEP_S
            self._produce()
            self._transmit(beat=step % int(limits.HEARTBEAT_S / STEP_S) == 0)
            for message in self.network.arrived():
                self._arrive(message)
            self._read()
            self._tend()
            assert self.unread <= WINDOW
            assert self.outbox.unacked_bytes <= WINDOW * 2 + max(self.sizes, default=0) + 2 * COST
            if self.outbox.done and not self.unread:
                return
        pytest.fail(f"not over after {MOST_STEPS} steps: {self.outbox.acked} of {len(self.sizes) + 1} acknowledged")

    def _produce(self) -> None:
        """As a plain generator: it goes on when what it yielded last is on its way."""
        while not self.outbox.ended and not self.outbox.blocked and self.random.random() < 0.8:
            made = self.outbox.next_index
            if made < len(self.sizes):
                self.outbox.push(FrameKind.OUTPUT, bytes([made % 256]) * self.sizes[made])
            else:
                self.outbox.push(FrameKind.END, b"the end")
            self._transmit(beat=False)

    def _transmit(self, *, beat: bool) -> None:
        while frames := self.outbox.take(300):
            self.network.send(("frames", frames))
        if beat:
            self.network.send(("beat", self.outbox.next_index))

    def _arrive(self, message: Any) -> None:
        kind, *content = message
        if kind == "frames":
            ready = self.inbox.on_frames(content[0], self.time)
            self.got += ready
            self.unread += sum(frame.cost for frame in ready if frame.kind is not FrameKind.END)
        elif kind == "beat":
            self.inbox.on_beat(content[0], self.time)
        elif kind == "ack":
            self.outbox.on_ack(*content)
        else:
            self.outbox.on_resend(*content)

    def _read(self) -> None:
        if self.unread and self.random.random() < self.reads:
            self.inbox.consume(self.unread)
            self.unread = 0

    def _tend(self) -> None:
        index = self.inbox.resend(self.time)
        if index is not None:
            self.network.send(("resend", index))
        ack = self.inbox.ack(self.time)
        if ack is not None:
            self.network.send(("ack", *ack))


@given(
    sizes=st.lists(st.integers(0, WINDOW - COST), max_size=60),
    seed=st.integers(0, 2**32),
    loss=st.floats(0, 0.5),
    repeat=st.floats(0, 0.5),
    delay=st.integers(1, 8),
    reads=st.floats(0.1, 1),
)
@settings(max_examples=examples(500), deadline=None)
def test_every_frame_arrives_once_and_in_order(
    sizes: list[int], seed: int, loss: float, repeat: float, delay: int, reads: float
) -> None:
    random = Random(seed)
    pair = Pair(sizes, random, Network(random, loss, repeat, delay), reads)
    pair.run()
    assert [frame.index for frame in pair.got] == list(range(len(sizes) + 1))
    assert [len(frame.data) for frame in pair.got[:-1]] == sizes
    assert pair.got[-1].data == b"the end"
    assert pair.inbox.ended


@given(value=st.binary(max_size=3 * limits.MAX_PART), budget=st.integers(1, limits.BATCH_BYTES))
@settings(max_examples=20, deadline=None)
def test_a_value_of_any_size_travels_in_parts(value: bytes, budget: int) -> None:
    outbox, inbox = Outbox(), Inbox()
    outbox.push_value(FrameKind.OUTPUT, value)
    outbox.close()
    got: list[Frame] = []
    while frames := outbox.take(budget):
        assert sum(len(frame.data) for frame in frames) <= max(budget, limits.MAX_PART)
        got += inbox.on_frames(frames, 0.0)
    assert b"".join(frame.data for frame in got) == value
    assert [frame.more for frame in got] == [True] * (len(got) - 1) + [False]


def test_a_lost_acknowledgement_of_a_blocked_sender_is_said_again_after_a_beat() -> None:
    one = 10 + COST
    outbox, inbox = Outbox(one), Inbox(one)
    outbox.push(FrameKind.OUTPUT, b"x" * 10)
    inbox.on_frames(outbox.take(), 0.0)
    inbox.consume(one)
    assert inbox.ack(1.0) == (1, 2 * one)  # lost
    outbox.push(FrameKind.OUTPUT, b"y" * 10)
    assert outbox.blocked
    inbox.on_beat(1, 2.0)
    assert inbox.ack(2.0) == (1, 2 * one)
    outbox.on_ack(1, 2 * one)
    assert [frame.index for frame in outbox.take()] == [1]


def test_frames_beyond_the_credit_are_refused() -> None:
    inbox = Inbox(10 + COST)
    inbox.on_frames([Frame(0, FrameKind.OUTPUT, b"x" * 10)], 0.0)
    with pytest.raises(ProtocolError, match="credit"):
        inbox.on_frames([Frame(1, FrameKind.OUTPUT, b"")], 0.0)


@pytest.mark.parametrize("data", [b"", b"1"])
def test_frames_of_little_data_are_not_free(data: bytes) -> None:
    outbox, inbox = Outbox(), Inbox()
    for _ in range(limits.WINDOW):
        outbox.push(FrameKind.OUTPUT, data)
        if outbox.blocked:
            break
    while frames := outbox.take():
        inbox.on_frames(frames, 0.0)
    assert inbox.next_index == outbox.next_index - 1 == limits.WINDOW // (COST + len(data))
    with pytest.raises(ProtocolError, match="credit"):
        inbox.on_frames([Frame(inbox.next_index, FrameKind.OUTPUT, data)], 0.0)
    early = Inbox()
    early.on_frames([Frame(index, FrameKind.OUTPUT, data) for index in range(1, limits.WINDOW // 16)], 0.0)
    assert limits.WINDOW // 2 < early.ahead_bytes <= limits.WINDOW


def test_what_comes_early_is_kept_within_the_window() -> None:
    inbox = Inbox(3 * (5 + COST))
    inbox.on_frames([Frame(index, FrameKind.OUTPUT, b"x" * 5) for index in range(1, 100)], 0.0)
    inbox.consume(COST)
    assert inbox.ahead_bytes <= 3 * (5 + COST)
    assert [frame.index for frame in inbox.on_frames([Frame(0, FrameKind.OUTPUT, b"")], 0.0)] == [0, 1, 2, 3]


def test_the_end_needs_no_credit() -> None:
    outbox, inbox = Outbox(10 + COST), Inbox(10 + COST)
    outbox.push(FrameKind.OUTPUT, b"x" * 10)
    outbox.push(FrameKind.END, b"e" * 100)
    assert [frame.kind for frame in inbox.on_frames(outbox.take(), 0.0)] == [FrameKind.OUTPUT, FrameKind.END]
    assert inbox.ack(0.0) == (2, 10 + COST)


def test_misuse_is_refused() -> None:
    outbox = Outbox()
    with pytest.raises(ProtocolError, match="above the limit"):
        outbox.push(FrameKind.OUTPUT, b"x" * (limits.MAX_PART + 1))
    with pytest.raises(ProtocolError, match="acknowledgement"):
        outbox.on_ack(1, 0)
    outbox.push(FrameKind.END, b"")
    with pytest.raises(ProtocolError, match="after the end"):
        outbox.push(FrameKind.OUTPUT, b"")
    outbox.on_ack(1, 0)
    outbox.on_resend(0)  # late, for what is gone
    assert outbox.take() == ()
    assert outbox.done


def test_frames_that_have_their_index_are_taken_as_they_are() -> None:
    source, relay = Outbox(), Outbox()
    source.push(FrameKind.OUTPUT, b"12")
    source.push(FrameKind.OUTPUT, b"345", more=True)
    source.push(FrameKind.END, b"end")
    frames = source.take()
    relay.extend(frames[:1])
    with pytest.raises(ProtocolError, match="frame 2 of a stream whose next is 1"):
        relay.extend(frames[2:])
    relay.extend(frames[1:])
    assert (relay.take(), relay.pushed_bytes, relay.ended) == (frames, 5 + 2 * COST, True)
    with pytest.raises(ProtocolError, match="after the end"):
        relay.extend([Frame(3, FrameKind.OUTPUT, b"")])
    with pytest.raises(ProtocolError, match="above the limit"):
        Outbox().extend([Frame(0, FrameKind.OUTPUT, bytes(limits.MAX_PART + 1))])
