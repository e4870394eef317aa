"""What is recorded of starts and of calls: read where nobody who runs remembers them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TypeVar

import msgspec

from sllm_gateway.follow import Message, messages
from sllm_gateway.written import event_of
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.ctl import Explained
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.events import Event

log = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


async def recorded(bus: Bus, function: str) -> dict[str, Explained]:
    """The last starts of ``function`` by instance, the oldest first; none while JetStream does not answer."""
    told = await _all(bus, subjects.DECISIONS_STREAM, subjects.decision(function), _decision)
    return {start.instance: each for each in told for start in each.starts}


async def events_of(bus: Bus, call: str) -> list[Event]:
    """What was told of the call of that id, the oldest first; nothing while JetStream does not answer."""
    if not subjects.is_token(call):
        return []
    own, _ = subjects.events_of(call=call)
    return await _all(bus, subjects.EVENTS_STREAM, own, event_of)


def _decision(message: Message) -> Explained:
    return codec.unpack(Explained, message.data or b"")


async def _all(bus: Bus, stream: str, subject: str, read: Callable[[Message], T]) -> list[T]:
    found: list[T] = []
    try:
        async with aclosing(messages(bus, stream, subject, None)) as reading:
            async for message in reading:
                if message.data is None:
                    break
                with suppress(ProtocolError):  # of a writer that this release does not understand
                    found.append(read(message))
    except Unavailable as error:
        log.warning("%s is not read: %s", subject, error.message)
    return found
