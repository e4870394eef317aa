"""Yields tokens that say when they were due: what the gateway benchmark streams through every system."""

import asyncio
import time
from collections.abc import AsyncIterator

from sllm import model_function


async def tokens(count: int, interval: float) -> AsyncIterator[str]:
    """``count`` tokens ``t<index>@<due>.``: due every ``interval`` seconds from the first on, on CLOCK_MONOTONIC in
    ns. With no interval each is due when it is made. A token that is late does not delay the next one's due time."""
    began = time.monotonic_ns()
    for index in range(count):
        due = began + round(index * interval * 1e9) if interval else time.monotonic_ns()
        if (wait := due - time.monotonic_ns()) > 0:
            await asyncio.sleep(wait / 1e9)
        yield f"t{index}@{due}."


@model_function(memory="1GiB", concurrency=2048, max_queue=4096, keep_alive="600s")
async def paced(count: int = 100, interval: float = 0.02) -> AsyncIterator[str]:
    """Tokens without a model."""
    async for token in tokens(count, interval):
        yield token
