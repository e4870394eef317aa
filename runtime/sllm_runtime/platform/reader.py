"""Reads what a consumer has, in order and in shares: no more is on its way to a reader than it has room for.

Where it were pushed, NATS would cut off whoever lets much wait, with all else that its connection is for.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig

from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.platform.consumers import ask, forget
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import KIB, MIB

SILENCE_S: Final = 4.0
"""A consumer that has sent neither a message nor a heartbeat for so long is not trusted any more."""
QUEUED_BYTES: Final = 8 * MIB
"""Of messages that their reader has not taken yet. More is asked for when it has come so far."""
MESSAGE_BYTES: Final = 1024
"""What a message takes beside its data."""
_AROUND: Final = 8 * KIB
"""More than its subjects take, which JetStream counts as well."""
_STORED: Final = "$JS.ACK."
"""What the reply subject of every message of a stream begins with."""
_HEARTBEAT: Final = "100"


class Lost(Exception):
    """This consumer can no longer be trusted."""


class Reader:
    """One consumer's life, checked for gaps. ``open`` it, and ``close`` it however that ended."""

    def __init__(self, bus: Bus, stream: str, asked: ConsumerConfig) -> None:
        self._bus, self._stream, self._asked = bus, stream, asked
        self._inbox = bus.new_inbox()
        # The largest message goes into it.
        nbytes = min(bus.max_payload + _AROUND, QUEUED_BYTES // 2)
        most = nbytes // MESSAGE_BYTES
        self._come = _Come(most, nbytes, lambda: ask(bus, stream, asked, self._inbox, most, nbytes))
        self._off: Callable[[], None] = lambda: None
        self._subscription: Subscription | None = None
        self._delivered = 0

    async def open(self) -> int:
        """Makes the consumer: how many messages there are for it by now. Raises ``Unavailable``."""
        self._off = self._bus.on_reconnect(self._come.end)
        self._subscription = await self._bus.subscribe_raw(self._inbox, self._come.put)
        try:
            made = await self._bus.jetstream.add_consumer(self._stream, self._asked)
        except nats.errors.Error as error:
            raise Unavailable(f"{self._stream} cannot be read: {error or type(error).__name__}") from error
        return made.num_pending or 0

    async def next(self) -> Msg | None:
        """The next message; None: for a while nothing has come. Raises ``Lost``."""
        message = await self._come.next()
        if not _is_stored(message):
            last = (message.headers or {}).get("Nats-Last-Consumer")
            if last is not None and int(last) != self._delivered:
                raise Lost("a message was lost")
            return None
        self._delivered += 1
        number = message.metadata.sequence.consumer
        if number != self._delivered:
            raise Lost(f"gap before {number}")
        return message

    async def close(self) -> None:
        """Nobody reads it any more."""
        self._off()
        forget(self._bus, self._stream, self._asked)
        if self._subscription is not None:
            await self._subscription.unsubscribe()


class _Come:
    """What a consumer has sent and its reader has not taken yet. It is asked for more, at most ``most`` messages of
    ``nbytes`` in all, as soon as it has sent all that it was asked for and these have room in QUEUED_BYTES."""

    def __init__(self, most: int, nbytes: int, ask: Callable[[], Awaitable[None]]) -> None:
        self._share, self._nbytes, self._ask = nbytes + most * MESSAGE_BYTES, nbytes, ask
        self._left = 0
        """Bytes that it may send still, as JetStream counts them."""
        self._waiting: deque[Msg] = deque()
        self._bytes = 0
        self._asked, self._sent = False, False
        """Whether it may send something, and whether any of that has come."""
        self._ended = ""
        self._news = asyncio.Event()

    async def put(self, message: Msg) -> None:
        """It came; beyond QUEUED_BYTES it is left, and all behind it: the server was asked for less."""
        if self._ended:
            return
        if not _is_stored(message):
            await self._told(message)
            return
        self._sent = True
        if self._bytes + _nbytes(message) > QUEUED_BYTES:
            self.end("more came than was asked for")
            return
        self._bytes += _nbytes(message)
        self._waiting.append(message)
        self._news.set()
        self._left -= _counted(message)
        if not self._left:  # JetStream says nothing of that, and sends no more
            await self._answered("")

    async def _told(self, message: Msg) -> None:
        """A heartbeat takes no room, neither of what was asked for: the last one says as much as all before it."""
        if (status := (message.headers or {}).get("Status")) != _HEARTBEAT:
            await self._answered(f"{status} {(message.headers or {}).get('Description', '')}")
            return
        if self._waiting and not _is_stored(self._waiting[-1]):
            self._waiting.pop()
        self._waiting.append(message)
        self._news.set()

    async def _answered(self, status: str) -> None:
        """It sends no more of what it was asked for. Where it has sent nothing it is gone, or never will."""
        self._asked = False
        if self._sent:
            await self._more()
        else:
            self.end(status)

    async def _more(self) -> None:
        if self._asked or self._ended or self._bytes + self._share > QUEUED_BYTES:
            return
        self._asked, self._sent, self._left = True, False, self._nbytes
        try:
            await self._ask()
        except Unavailable as error:
            self.end(error.message)

    def end(self, why: str = "NATS was gone") -> None:
        """No more comes that counts."""
        self._ended = self._ended or why
        self._news.set()

    async def next(self) -> Msg:
        """Raises ``Lost``."""
        await self._more()
        while not self._waiting:
            if self._ended:
                raise Lost(self._ended)
            self._news.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._news.wait()
            except TimeoutError:
                raise Lost("no heartbeat") from None
        message = self._waiting.popleft()
        self._bytes -= _nbytes(message) if _is_stored(message) else 0
        return message


def _is_stored(message: Msg) -> bool:
    return message.reply.startswith(_STORED)


def _nbytes(message: Msg) -> int:
    return len(message.data) + MESSAGE_BYTES


def _counted(message: Msg) -> int:
    """What JetStream counts of it towards the bytes that were asked for."""
    headers = message.headers or {}
    lines = sum(len(name) + len(value) + 4 for name, value in headers.items()) + 12 if headers else 0
    return len(message.subject) + len(message.reply) + lines + len(message.data)
