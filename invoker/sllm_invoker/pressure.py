"""Whether the node's memory is short, so that sandboxes that only wait make room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 1.0
ENOUGH: Final = 2
"""Times the floor: what ends it. One sandbox more or less must not turn it on and off."""


def short(available: int, floor: int, was: bool) -> bool:
    """From less than ``floor`` bytes on, until ``ENOUGH`` times as much is available."""
    return available < floor * ENOUGH if was else available < floor


async def watch(available: Callable[[], int], floor: int, told: Callable[[bool], None]) -> None:
    """Tell each change, until cancelled. ``floor`` 0: memory is never short."""
    was = False
    while True:
        now = short(available(), floor, was)
        if now is not was:
            told(now)
        was = now
        await asyncio.sleep(LOOK_S)
