"""A generator without a model: every value it yields is one event of the stream."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from pydantic import Field

from sllm import model_function


@model_function(memory="256MiB", concurrency=64)
async def counter(
    to: Annotated[int, Field(ge=0, le=1_000_000)] = 10,
    interval: Annotated[float, Field(ge=0, le=10)] = 0.0,
) -> AsyncIterator[int]:
    """Counts from 1 to `to`, `interval` seconds between two numbers."""
    for number in range(1, to + 1):
        if number > 1 and interval:
            await asyncio.sleep(interval)
        yield number
