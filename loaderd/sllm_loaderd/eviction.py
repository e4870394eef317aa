"""Dropping a model from all memory when somebody asks for it: what nobody waits for any more is let end first."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from sllm_loaderd.device_stage import DeviceStage
from sllm_loaderd.residency import Residency
from sllm_runtime.protocol.errors import Conflict

EVICT_S: Final = 20.0
"""One chunk is read, copied or written within this, on any medium that is of use."""


async def evict(digest: str, stage: DeviceStage, residency: Residency, within_s: float = EVICT_S) -> None:
    """Drop ``digest`` from devices and memory. Reads, copies and SSD writes under way end first.

    Raises ``Conflict`` while somebody loads it, or if what runs does not end ``within_s``.
    """
    stage.evict(digest)
    try:
        async with asyncio.timeout(within_s):
            while residency.ending(digest):
                changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                residency.watch(partial(_wake, changed))
                await changed
    except TimeoutError as error:
        text = f"model {digest} is still being read, copied or written after {within_s:g} s: its disk or link hangs"
        raise Conflict(text, field="model") from error
    stage.evict(digest)  # what was loaded and let go meanwhile
    residency.evict(digest)


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():  # its time was over
        waiting.set_result(None)
