"""What goes to one gateway: everything that is ready in one loop tick leaves as one message."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol, TypeAlias

from sllm_invoker.call import Call, Key
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.frames import Ack, Beat, Resend, Segment, ToGateway, Unknown

log = logging.getLogger(__name__)

Item: TypeAlias = Segment | Beat | Unknown | Ack | Resend
MAX_ITEMS: Final = 2048
_ITEM_BYTES: Final = 128
"""Room for one item's envelope: a call's id, its epoch, indexes."""
RETRY_S: Final = 0.1
_ROOM: Final = limits.MAX_MESSAGE - 32 * limits.KIB


class Line(Protocol):
    """The way to one gateway."""

    @property
    def free(self) -> bool:
        """Whether it takes messages now, so that ``send_now`` keeps none of them waiting."""

    def send_now(self, message: ToGateway) -> None:
        """Send without waiting. Raises ``Unavailable``."""

    async def send(self, message: ToGateway) -> None:
        """Send, and wait while others go first. Raises ``Unavailable``."""


class BusLine:
    """The line over NATS."""

    def __init__(self, bus: Bus, subject: str) -> None:
        self._bus = bus
        self._subject = subject

    @property
    def free(self) -> bool:
        return self._bus.free

    def send_now(self, message: ToGateway) -> None:
        self._bus.publish_now(self._subject, message)

    async def send(self, message: ToGateway) -> None:
        await self._bus.publish(self._subject, message)


class GatewayLink:
    """Frames and notes that wait for one gateway. They leave at the end of the loop's tick; what the line does not
    take then is sent by ``run``, for as long as that is not cancelled. ``call_soon`` is the loop's."""

    def __init__(
        self,
        gateway: str,
        line: Line,
        clock: Callable[[], float],
        call_soon: Callable[[Callable[[], None]], object],
    ) -> None:
        self.gateway = gateway
        self._line = line
        self._clock = clock
        self._call_soon = call_soon
        self._dirty: dict[Key, Call] = {}
        self._notes: deque[Item] = deque(maxlen=4 * MAX_ITEMS)  # each is repeated until it has had its effect
        self._flushing = False
        self._held = asyncio.Event()
        """Set when the line did not take everything at the end of a tick."""
        self.connected = asyncio.Event()
        self.connected.set()

    @property
    def waiting(self) -> bool:
        """Whether there is anything to send."""
        return bool(self._dirty or self._notes)

    def dirty(self, call: Call) -> None:
        """``call`` may have frames to send."""
        self._dirty[call.key] = call
        self._soon()

    def note(self, item: Item) -> None:
        """Send ``item`` with the next message."""
        self._notes.append(item)
        self._soon()

    def _soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._call_soon(self._flush)

    def _flush(self) -> None:
        """Send all that is ready, as far as the line takes it."""
        self._flushing = False
        try:
            while self._line.free:
                if (message := self.collect()) is None:
                    return
                self._line.send_now(message)
        except Unavailable as error:  # its frames are kept, and asked for again
            log.warning("gateway %s: %s", self.gateway, error.message)
        self._held.set()

    def collect(self) -> ToGateway | None:
        """The next message, below MAX_MESSAGE; None when nothing waits."""
        items: list[Item] = []
        budget = _ROOM
        while self._notes and len(items) < MAX_ITEMS // 2:
            items.append(self._notes.popleft())
            budget -= _ITEM_BYTES
        now = self._clock()
        for key, call in list(self._dirty.items()):
            if budget < limits.MAX_PART or len(items) >= MAX_ITEMS:
                break  # the first frame of a call may be a whole part
            del self._dirty[key]
            before = call.outbox.sent_bytes
            frames = call.take(budget, now)
            if not frames:
                continue
            items.append(Segment(call.head.call, call.head.epoch, frames))
            budget -= _ITEM_BYTES + call.outbox.sent_bytes - before  # a frame's cost is more than its envelope
            if frames[-1].index + 1 < call.outbox.next_index:
                self._dirty[key] = call  # at the end: no call keeps others from their turn
        return ToGateway(tuple(items)) if items else None

    async def run(self) -> None:
        """Send what the line did not take, until cancelled. While the bus is away frames wait in their calls."""
        while True:
            await self._held.wait()
            await self.connected.wait()
            self._held.clear()
            while (message := self.collect()) is not None:
                try:
                    await self.send(message)
                except Unavailable as error:  # its frames are kept, and asked for again
                    log.warning("gateway %s: %s", self.gateway, error.message)
                    await asyncio.sleep(RETRY_S)

    async def send(self, message: ToGateway) -> None:
        """Send one message, however long the line takes. Raises ``Unavailable``."""
        await self._line.send(message)
