"""For all tests of the invoker."""

import asyncio
from collections.abc import AsyncIterator

import pytest


@pytest.fixture(autouse=True)
async def no_thread_left() -> AsyncIterator[None]:
    """The loop's threads end with the test; first in, so it is the last out."""
    yield
    await asyncio.get_running_loop().shutdown_default_executor()
