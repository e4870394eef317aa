"""Calls between gateways and instances: opened, fed, acknowledged, cancelled, ended. No instance is managed here.

The relay keeps every frame until its gateway has acknowledged it, so a lost message costs a repetition and no token.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, Literal, Protocol

from sllm_invoker.call import Call, Key
from sllm_invoker.gateway_link import GatewayLink, Line
from sllm_invoker.turns import Turns
from sllm_runtime.platform.hearing import Hearing
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import ErrorBody, GatewaySilent, ProtocolError
from sllm_runtime.protocol.frames import (
    Ack,
    Beat,
    Cancel,
    Feed,
    Hold,
    Open,
    Opened,
    Parts,
    Resend,
    ToNode,
    Unknown,
)

log = logging.getLogger(__name__)

KEEP_ENDED_S: Final = 60.0
"""An end that nobody acknowledges is kept this long, and the link to a gateway that has no call here."""
REMEMBER_S: Final = 10.0
"""A cancel that overtook its call, and a call that is over, are remembered this long: ``Open`` may come again."""
MAX_REMEMBERED: Final = 65536
DEADLINE_SLACK_S: Final = 2.0
"""The gateway ends calls at their deadline; this much later the node does, for a gateway that is no more."""
HELD_S: Final = 30.0
"""A call that is held and of which its gateway says nothing for so long draws: it has frames to acknowledge then, and
ends if nobody does."""


class Host(Protocol):
    """The instance that works on a call."""

    @property
    def open_for_calls(self) -> bool:
        """READY, and not draining."""

    @property
    def free_slot(self) -> bool:
        """Whether it can take one more call now."""

    def begin(self, call: Call, body: list[bytes]) -> None:
        """Hand the call and the parts of its body that are here to the worker."""

    def feed(self, call: Call, body: list[bytes]) -> None:
        """More of the body."""

    def credit(self, call: Call) -> None:
        """The call's gateway takes more."""

    def follow(self, call: Call, on: bool) -> None:
        """Whether the call's ids are to come as they are drawn. Repeatable."""

    @property
    def holds(self) -> bool:
        """Whether its calls draw none before they may (``CallHead.held``, ``Hold``), and take ids (``Feed``)."""

    def tell_ids(self, call: Call, item: Feed) -> None:
        """Ids that the call has where it comes from. Repeatable."""

    def hold(self, call: Call, interval_s: float) -> None:
        """The call is to draw no more, or only a token each ``interval_s``. Repeatable."""

    def cancel(self, call: Call, code: str, reason: str) -> None:
        """Stop the call; its END follows."""

    def next_number(self) -> int:
        """Number of its next call."""


class Relay:
    """All calls of one node. Runs on one event loop; ``tick`` is called every TICK_S."""

    def __init__(
        self,
        find: Callable[[str], Host | None],
        line: Callable[[str], Line],
        clock: Callable[[], float],
        tasks: Tasks,
        yielded: Callable[[], None] = lambda: None,
        moves: Callable[[], None] = lambda: None,
    ) -> None:
        """``find`` an instance by its name; ``line`` leads to the gateway of that name. ``yielded`` is told when a slot
        stays free for a gateway that was refused before, and is to hear of it; ``moves`` whenever something is said to
        a call on its way to or from here."""
        self._find = find
        self._line = line
        self._clock = clock
        self._tasks = tasks
        self._yielded = yielded
        self._moves = moves
        self._turns = Turns()
        self._calls: dict[Key, tuple[Call, Host]] = {}
        self._links: dict[str, GatewayLink] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._unused: dict[str, float] = {}
        """Since when a link has nothing to do."""
        self._cancelled: dict[Key, float] = {}
        self._over: dict[Key, float] = {}
        self._began = self._ticked = clock()
        self._hearing = Hearing(0, self._began)
        self._connected_since: float | None = clock()

    @property
    def calls(self) -> int:
        """Calls it holds something of."""
        return len(self._calls)

    # --- from gateways ------------------------------------------------------------------------------
    def open(self, gateway: str, request: Open) -> Opened:
        """Judge one call. The same ``(call, epoch)`` is accepted once, however often it is asked."""
        head = request.head
        key = (head.call, head.epoch)
        if key in self._calls:
            return _taken(self._calls[key][1], note="again")
        if key in self._over:
            return Opened(status="accepted", note="again")
        if key in self._cancelled:
            return self._not_taken("busy", "cancelled before it was opened")
        host = self._find(head.instance)
        if host is None or not host.open_for_calls:
            return self._not_taken("gone", f"instance {head.instance} takes no calls here")
        version, now = (head.function, head.version), self._clock()
        if not host.free_slot:
            self._turns.refused(version, gateway, head.call, now)
            return self._not_taken("busy")
        # A call that moves has a slot of its own there.
        if not head.held and self._turns.yields(version, head.instance, gateway, self._running(version), now):
            self._turns.refused(version, gateway, head.call, now)
            self._yielded()
            return self._not_taken("busy", "its slot is kept for another gateway")
        self._turns.taken(version, head.instance, gateway, head.call, now)
        call = Call(host.next_number(), gateway, head, now)
        parts = call.take_body(request.first, now)
        if head.body_bytes == 0:
            call.body.close()
        if call.body.ended:
            call.body.ack(now, force=True)  # "accepted" says so
        self._calls[key] = (call, host)
        if head.held:
            self._moves()
        host.begin(call, parts)
        return _taken(host)

    def _running(self, version: tuple[str, int]) -> Callable[[str], int]:
        """Calls of it that run here, by gateway."""

        def running(gateway: str) -> int:
            calls = (call for call, _host in self._calls.values() if call.gateway == gateway and call.running)
            return sum((call.head.function, call.head.version) == version for call in calls)

        return running

    def _not_taken(self, status: Literal["busy", "gone"], note: str = "") -> Opened:
        return Opened(status=status, note=note, knows_s=self._clock() - self._began)

    def on_message(self, gateway: str, message: ToNode) -> None:
        """Everything one gateway sent in one step."""
        for item in message.items:
            found = self._calls.get((item.call, item.epoch))
            if found is None or found[0].gateway != gateway:
                self._unknown(gateway, item)
                continue
            try:
                self._on_item(*found, item)
            except ProtocolError as error:
                log.warning("call %s: gateway %s: %s", item.call, gateway, error.message)
                self._end(*found, error.body())

    def _unknown(self, gateway: str, item: Parts | Ack | Resend | Feed | Hold | Cancel) -> None:
        if isinstance(item, Cancel):
            _remember(self._cancelled, (item.call, item.epoch), self._clock())
        self._link(gateway).note(Unknown(item.call, item.epoch))

    def _on_item(self, call: Call, host: Host, item: Parts | Ack | Resend | Feed | Hold | Cancel) -> None:
        now = call.heard = self._clock()
        match item:
            case Parts():
                if parts := call.take_body(item.frames, now):
                    host.feed(call, parts)
                self._answer_body(call, now)
            case Ack():
                self._on_ack(call, host, item, now)
            case Resend():
                call.outbox.on_resend(item.index)
                self.ready(call)
            case Feed() | Hold() | Cancel():
                if not isinstance(item, Cancel):
                    self._moves()
                if call.running:
                    _pass_on(call, host, item)

    def _on_ack(self, call: Call, host: Host, item: Ack, now: float) -> None:
        if item.follow:
            self._moves()
        more = call.on_ack(item.next_index, item.limit, now)
        if call.running:
            host.credit(call)
            host.follow(call, item.follow)
        if more:
            self.ready(call)
        if call.outbox.done:
            self._forget(call)

    # --- from instances -----------------------------------------------------------------------------
    def ready(self, call: Call) -> None:
        """``call`` has frames to send (or may have)."""
        self._link(call.gateway).dirty(call)

    def consumed(self, call: Call, cost: int) -> None:
        """The worker took frames of the body that had this ``cost``."""
        call.body.consume(cost)
        if call.body.owes or not call.body.ended:
            self._answer_body(call, self._clock())

    def _answer_body(self, call: Call, now: float) -> None:
        link = self._link(call.gateway)
        if (ack := call.body.ack(now)) is not None:
            link.note(Ack(*call.key, *ack))
        if (index := call.body.resend(now)) is not None:
            link.note(Resend(*call.key, index))

    def _end(self, call: Call, host: Host, error: ErrorBody) -> None:
        """Stop a call whose gateway broke the protocol or is gone: the worker is told, the end kept for a while."""
        if call.running:
            host.cancel(call, error.code, error.message)

    # --- time ---------------------------------------------------------------------------------------
    def tick(self, heard: int = 0) -> None:
        """Beats, repetitions, and what has waited too long. ``heard``: as ``Bus.heard``."""
        now = self._clock()
        stalled = now - self._ticked > limits.STALL_S or (heard > 0 and self._hearing.deaf(heard, now))
        self._ticked = now
        for memory in (self._cancelled, self._over):
            _outdate(memory, now - REMEMBER_S)
        self._turns.outdate(now)
        beat = any(now - call.said >= limits.HEARTBEAT_S for call, _host in self._calls.values())
        busy = set[str]()
        for call, host in list(self._calls.values()):
            busy.add(call.gateway)
            if call.running:
                self._answer_body(call, now)
            if beat and now - call.said >= limits.HEARTBEAT_S / 2:  # those that are silent, in one message
                self._beat(call, now)
            if stalled:
                call.forgive(now)
            self._judge(call, host, now)
        self._drop_unused(busy, now)

    def _drop_unused(self, busy: set[str], now: float) -> None:
        """A gateway may have another name in each of its lives. ``busy``: those that have calls."""
        for gateway, link in list(self._links.items()):
            if gateway in busy or link.waiting:
                self._unused.pop(gateway, None)
            elif now - self._unused.setdefault(gateway, now) > KEEP_ENDED_S:
                del self._links[gateway], self._unused[gateway]
                self._senders.pop(gateway).cancel()

    def _beat(self, call: Call, now: float) -> None:
        call.said = now
        self._link(call.gateway).note(Beat(*call.key, call.sent))

    def _judge(self, call: Call, host: Host, now: float) -> None:
        if not call.running:
            ended = call.ended_at if call.ended_at is not None else now
            if min(now - ended, self._connected_for(now)) > KEEP_ENDED_S:
                log.warning("call %s: gateway %s never acknowledged its end", call.head.call, call.gateway)
                self._forget(call)
            return
        if call.cancel is not None:
            return
        if now - call.began > call.head.timeout_s + DEADLINE_SLACK_S:
            host.cancel(call, "deadline_exceeded", f"it ran longer than {call.head.timeout_s:g} s")
        elif self._connected_for(now) > limits.LOST_AFTER_S and call.unheard_s(now) > limits.LOST_AFTER_S:
            log.warning("call %s: gateway %s acknowledges nothing, cancelled", call.head.call, call.gateway)
            host.cancel(call, GatewaySilent.code, f"nothing was heard of its gateway {call.gateway}; call again")
        elif call.held and host.holds and self._connected_for(now) > HELD_S and now - call.heard > HELD_S:
            log.warning("call %s: gateway %s does not say that it may draw; it does", call.head.call, call.gateway)
            call.held = False
            host.tell_ids(call, Feed(*call.key, 0, 0, ()))

    def _forget(self, call: Call) -> None:
        del self._calls[call.key]
        _remember(self._over, call.key, self._clock())

    def _connected_for(self, now: float) -> float:
        return 0.0 if self._connected_since is None else now - self._connected_since

    def overdue(self) -> set[str]:
        """Gateways that should have said something of what runs for them since."""
        now = self._clock()
        running = (call for call, _host in self._calls.values() if call.running and call.cancel is None)
        return {call.gateway for call in running if call.unheard_s(now) >= limits.OVERDUE_S}

    def on_left(self, gateway: str) -> None:
        """A gateway has left NATS: what runs for it, and of which it has said nothing lately, ends without waiting for
        its silence."""
        before = self._clock() - limits.OVERDUE_S
        for call, host in list(self._calls.values()):
            if call.gateway == gateway and call.running and call.cancel is None and call.heard <= before:
                log.warning("call %s: gateway %s has left, cancelled", call.head.call, gateway)
                host.cancel(call, GatewaySilent.code, f"its gateway {gateway} has left; call again")

    def on_disconnect(self) -> None:
        """The bus is away: frames wait, nobody is judged by silence."""
        self._connected_since = None
        for link in self._links.values():
            link.connected.clear()

    def on_reconnect(self) -> None:
        """The bus is back: tell every gateway how far each call is, so that it asks for what it lacks."""
        now = self._clock()
        self._connected_since = now
        for call, _host in self._calls.values():
            call.forgive(now)
            self._beat(call, now)
        for link in self._links.values():
            link.connected.set()

    async def flush(self) -> None:
        """Send what can be sent now: the last words of a node that ends."""
        for link in self._links.values():
            while link.connected.is_set() and (message := link.collect()) is not None:
                await link.send(message)

    def _link(self, gateway: str) -> GatewayLink:
        link = self._links.get(gateway)
        if link is None:
            call_soon = asyncio.get_running_loop().call_soon
            link = self._links[gateway] = GatewayLink(gateway, self._line(gateway), self._clock, call_soon)
            if self._connected_since is None:
                link.connected.clear()
            self._senders[gateway] = self._tasks.start(link.run(), f"frames-{gateway}")
        return link


def _pass_on(call: Call, host: Host, item: Feed | Hold | Cancel) -> None:
    match item:
        case Feed():
            call.held = call.held and item.held
            if host.holds:
                host.tell_ids(call, item)
        case Hold() if host.holds:
            call.held = not item.interval_s
            host.hold(call, item.interval_s)
        case Cancel():
            host.cancel(call, item.code, item.reason)


def _taken(host: Host, note: str = "") -> Opened:
    return Opened(status="accepted", note=note, feeds=host.holds, holds=host.holds)


def _remember(memory: dict[Key, float], key: Key, now: float) -> None:
    """Note ``key``; the oldest goes when there are too many."""
    memory.pop(key, None)
    if len(memory) >= MAX_REMEMBERED:
        del memory[next(iter(memory))]
    memory[key] = now


def _outdate(memory: dict[Key, float], before: float) -> None:
    """Drop what was noted before that time; the oldest comes first."""
    while memory and memory[oldest := next(iter(memory))] < before:
        del memory[oldest]
