"""What controllers have recorded of starts: read where the one that leads does not remember them."""

from __future__ import annotations

import logging
from contextlib import aclosing

from sllm_gateway.follow import messages
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.ctl import Explained
from sllm_runtime.protocol.errors import ProtocolError, Unavailable

log = logging.getLogger(__name__)


async def recorded(bus: Bus, function: str) -> dict[str, Explained]:
    """The last starts of ``function`` by instance, the oldest first; none while JetStream does not answer."""
    found: dict[str, Explained] = {}
    try:
        async with aclosing(messages(bus, subjects.DECISIONS_STREAM, subjects.decision(function), None)) as read:
            async for data in read:
                if data is None:
                    break
                try:
                    told = codec.unpack(Explained, data)
                except ProtocolError:
                    continue  # of a controller that this release does not understand
                found.update((start.instance, told) for start in told.starts)
    except Unavailable as error:
        log.warning("recorded starts of %s: %s", function, error.message)
    return found
