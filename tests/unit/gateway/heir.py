"""``python -m tests.unit.gateway.heir LIFE ENTRY``: a gateway's successor that is killed in the middle of it.

It takes over what life LIFE left, as the gateway does, and once ENTRY of a call is in the journal it says so on stdout
and stands still.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import cast

from sllm_gateway.hearsay import Hearsay
from sllm_gateway.journal import Journal
from sllm_gateway.ledger import Ledger
from sllm_gateway.lives import Lives
from sllm_gateway.roll import Roll
from sllm_gateway.stored import Stored
from sllm_gateway.succession import Succession
from sllm_gateway.taking_up import TakingUp
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.calls import Entry, entry_name
from tests.fixtures.nats import GATEWAY

REACHED = b"it stands there\n"


class StandsStill(Journal):
    """Writes as ever, up to one entry."""

    def __init__(self, bus: Bus, stored: Stored, last: str) -> None:
        super().__init__(bus, stored)
        self._stands_at = last

    async def create(self, stream: str, call: str, entry: Entry, keep_s: float, *, number: int | None = None) -> bool:
        created = await super().create(stream, call, entry, keep_s, number=number)
        if entry_name(type(entry), number) == self._stands_at:
            sys.stdout.buffer.write(REACHED)
            sys.stdout.buffer.flush()
            await asyncio.Event().wait()
        return created


async def inherit(life: str, last: str) -> None:
    """Never returns."""
    bus = await Bus.connect(Settings.load(), GATEWAY, name="heir")
    stored = Stored(bus)
    lives = Lives(bus, stored, GATEWAY, lambda count: b"h" * count, time.monotonic)
    await lives.beat()
    left = await lives.find(life)
    assert left is not None
    none = cast(TakingUp, None)  # what follows a whole take-over is not reached
    journal = StandsStill(bus, stored, last)
    hearsay = Hearsay(bus, GATEWAY)
    succession = Succession(lives, Roll(GATEWAY), Ledger(), hearsay, journal, none, lambda *_: None, time.monotonic)
    await succession._inherit(left)


if __name__ == "__main__":
    asyncio.run(inherit(*sys.argv[1:]))
