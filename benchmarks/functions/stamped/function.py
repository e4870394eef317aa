"""Yields tokens that say when they were made: what ``sandbox`` follows on their way."""

import asyncio
import time
from collections.abc import AsyncIterator

from sllm import model_function


@model_function(memory="256MiB", keep_alive="600s")
async def stamped(count: int = 100, interval: float = 0.01) -> AsyncIterator[str]:
    """``count`` tokens ``t<index>@<made>.``, ``interval`` seconds between them; made on CLOCK_MONOTONIC, in ns."""
    for index in range(count):
        await asyncio.sleep(interval)
        yield f"t{index}@{time.monotonic_ns()}."
