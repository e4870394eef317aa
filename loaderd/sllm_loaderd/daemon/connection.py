"""What both kinds of connection share: typed messages over a wire, and the hello."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import Cancelled, ErrorBody, InternalError, ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.loader import Answer, Failed, Hello, Welcome

_HELLO_S = 10.0
GRANTED_HELLO_S = 300.0
"""A granted session waits for its sandbox, which a busy node may take minutes to make; whoever asked for the grant
closes it when the start fails."""


class Connection:
    """One peer. ``kinds`` is the union of what it may send."""

    def __init__(self, wire: AsyncWire, kinds: Any) -> None:
        self.wire = wire
        self._kinds = kinds

    def say(self, message: Answer, fds: Sequence[int] = ()) -> None:
        """Send, or close the connection if the peer is gone or takes nothing. Raises ``OSError`` (descriptors)."""
        try:
            self.wire.send(pack(message), fds)
        except Unavailable:
            self.wire.close()

    def fail(self, request: int, error: SllmError) -> None:
        """Answer a request by an error."""
        self.say(Failed(request=request, error=error.body()))

    async def greet(self, welcome: Welcome, within_s: float = _HELLO_S) -> Hello | None:
        """Exchange hellos: the peer's; None (and the peer is told why) if it is none of ours."""
        try:
            async with asyncio.timeout(within_s):
                message = await self.receive()
        except TimeoutError:
            return None
        if message is None:
            return None
        if not isinstance(message, Hello):
            self.fail(0, ProtocolError("the first message has to be a hello"))
            return None
        if message.version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            self.fail(0, ProtocolError(f"version {message.version} is not served, {PROTOCOL_VERSION} is"))
            return None
        self.say(welcome)
        return message

    async def receive(self) -> Any:
        """The next message, None at the end. Raises ``ProtocolError``, and what the wire's ``receive`` raises."""
        payload = await self.wire.receive()
        return None if payload is None else unpack(self._kinds, payload)

    def take_fds(self, count: int) -> list[int]:
        """Descriptors that came with a message; the caller owns them."""
        return self.wire.fds.take(count)

    async def close(self) -> None:
        """Hand over what waits if the peer takes it, then close."""
        try:
            async with asyncio.timeout(1.0):
                await self.wire.drain()
        except TimeoutError:
            pass
        finally:
            self.wire.close()


def as_error(failure: BaseException) -> SllmError:
    """What the peer is told of ``failure``."""
    if isinstance(failure, SllmError):
        return failure
    if isinstance(failure, asyncio.CancelledError):
        return Cancelled("the request was cancelled")
    if isinstance(failure, OSError):
        return Unavailable(f"{failure.strerror or failure} ({failure.filename or 'loaderd'})")
    return InternalError(f"loaderd: {failure!r}")


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors."""
    for fd in fds:
        os.close(fd)


__all__ = ["Connection", "ErrorBody", "as_error", "close_all"]
