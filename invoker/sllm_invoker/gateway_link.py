"""What goes to one gateway: everything that is ready in one loop tick leaves as one message."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

from sllm_invoker.call import Call, Key
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


class GatewayLink:
    """Frames and notes that wait for one gateway. ``run`` sends them for as long as it is not cancelled."""

    def __init__(
        self,
        gateway: str,
        send: Callable[[ToGateway], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self.gateway = gateway
        self._send = send
        self._clock = clock
        self._dirty: dict[Key, Call] = {}
        self._notes: deque[Item] = deque(maxlen=4 * MAX_ITEMS)  # each is repeated until it has had its effect
        self._wake = asyncio.Event()
        self.connected = asyncio.Event()
        self.connected.set()

    def dirty(self, call: Call) -> None:
        """``call`` may have frames to send."""
        self._dirty[call.key] = call
        self._wake.set()

    def note(self, item: Item) -> None:
        """Send ``item`` with the next message."""
        self._notes.append(item)
        self._wake.set()

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
            frames = call.take(budget, now)
            if not frames:
                continue
            items.append(Segment(call.head.call, call.head.epoch, frames))
            budget -= _ITEM_BYTES + sum(len(frame.data) + limits.FRAME_ENVELOPE for frame in frames)
            if frames[-1].index + 1 < call.outbox.next_index:
                self._dirty[key] = call  # at the end: no call keeps others from their turn
        return ToGateway(tuple(items)) if items else None

    async def run(self) -> None:
        """Send until cancelled. While the bus is away frames wait in their calls."""
        while True:
            await self._wake.wait()
            await self.connected.wait()
            self._wake.clear()
            while (message := self.collect()) is not None:
                try:
                    await self._send(message)
                except Unavailable as error:  # its frames are kept, and asked for again
                    log.warning("gateway %s: %s", self.gateway, error.message)
                    await asyncio.sleep(RETRY_S)
