"""Reads a JetStream stream in order and goes on with what comes; begins anew after the last where anything is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import nats.errors
from nats.aio.msg import Msg
from nats.js.api import ConsumerConfig, DeliverPolicy

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.consumers import SILENCE_S, ask, consumer, forget
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import KIB, MIB

log = logging.getLogger(__name__)

AGAIN_S = 0.2
QUEUED_BYTES = 8 * MIB
"""Of messages that their reader has not taken yet. More is asked for when it has come so far."""
MESSAGE_BYTES = 1024
"""What a message takes beside its data."""
_AROUND = 8 * KIB
"""More than its subjects take, which JetStream counts as well."""
_STORED = "$JS.ACK."
"""What the reply subject of every message of a stream begins with."""
_HEARTBEAT = "100"


class Message(NamedTuple):
    """One of a stream, by its number there; without ``data``: everything that was there has come, up to that number."""

    number: int
    data: bytes | None
    subject: str = ""
    whole: bool = True
    """Without ``data``: whether all that was there has been read, not the ``newest`` alone."""


class _Read(NamedTuple):
    """What a consumer says: a message and how many are still to come; number 0: nothing new."""

    number: int = 0
    data: bytes = b""
    subject: str = ""
    written: datetime | None = None
    pending: int = 0


@dataclass
class _Place:
    """The last message that came, or up to which all has: its number, and when it was written, if that is known."""

    number: int
    written: datetime | None = None

    @property
    def start(self) -> int:
        """Behind which number to read on: a stream on disk may lose its last messages with its server, and give their
        numbers to others. So the last one is read again, and counts if it was written at another time."""
        return self.number if self.written is None else self.number - 1

    def goes_on(self, read: _Read) -> bool:
        """Whether ``read`` is news; then the place is there."""
        if not read.number or (read.number, read.written) == (self.number, self.written):
            return False
        self.number, self.written = read.number, read.written
        return True

    def behind(self, number: int) -> None:
        """All up to ``number`` has come, or is not wanted."""
        if number > self.number:
            self.number, self.written = number, None


class _Missing(Exception):
    """This consumer can no longer be trusted."""


async def messages(
    bus: Bus,
    stream: str,
    subject: str | Sequence[str],
    since: float | None,
    clock: Callable[[], float] = time.monotonic,
    idle: Callable[[], Awaitable[None]] | None = None,
    newest: int | None = None,
    after: int = 0,
    placed: bool = False,
) -> AsyncGenerator[Message, None]:
    """Each message under ``subject`` since ``since`` (Unix seconds; None: all that is kept), in order; with ``after``
    each behind the one of that number. ``newest``: of what is there already no more than so many of the stream's last
    are read.

    One without data, once, when everything that was there has come; ``placed``: its number is that of the stream's last
    then, wanted or not. ``idle`` is awaited about once a second while nothing comes; what it raises ends this. Never
    ends by itself. Raises ``Unavailable`` if JetStream has answered nothing within ELECTION_S.
    """
    told, first, whole, place = False, True, True, _Place(after)
    deadline = clock() + ELECTION_S
    while True:
        try:
            before, last = await _extent(bus, stream) if (placed or newest is not None) and not told else (0, 0)
            if first and newest is not None:
                place.behind(last - newest)
                whole = last - newest <= before
            async with aclosing(_consume(bus, stream, subject, since, place.start)) as consumer:
                async for read in consumer:
                    first = False
                    if place.goes_on(read):
                        yield Message(read.number, read.data, read.subject)
                    if read.pending == 0 and not told:
                        told = True
                        place.behind(last)
                        yield Message(place.number, None, whole=whole)
                    elif not read.number and idle is not None:
                        await idle()
        except Unavailable as error:
            if first and clock() > deadline:
                raise
            log.debug("%s; asked again", error.message)
        await asyncio.sleep(AGAIN_S)


async def _extent(bus: Bus, stream: str) -> tuple[int, int]:
    """Up to which number nothing is kept any more, and the number of the last message. Raises ``Unavailable``."""
    try:
        state = (await bus.jetstream.stream_info(stream)).state
        return state.first_seq - 1, state.last_seq
    except nats.errors.Error as error:
        raise Unavailable(f"{stream} cannot be read: {error or type(error).__name__}") from error


async def _consume(
    bus: Bus, stream: str, subject: str | Sequence[str], since: float | None, after: int
) -> AsyncGenerator[_Read, None]:
    """What one consumer says. Raises ``Unavailable`` when it can no longer be trusted."""
    inbox = bus.new_inbox()
    subscription, asked = None, _config(subject, since, after)
    # The largest message goes into it, and no more is ever on its way to one reader: NATS cuts off who lets much wait.
    nbytes = min(bus.max_payload + _AROUND, QUEUED_BYTES // 2)
    most = nbytes // MESSAGE_BYTES
    come = _Come(most, nbytes, lambda: ask(bus, stream, asked, inbox, most, nbytes))
    off = bus.on_reconnect(come.end)
    try:
        subscription = await bus.subscribe_raw(inbox, come.put)
        made = await bus.jetstream.add_consumer(stream, asked)
        if not made.num_pending:
            yield _Read()
        delivered = 0
        while True:
            message = await come.next()
            if not message.reply.startswith(_STORED):
                last = (message.headers or {}).get("Nats-Last-Consumer")
                if last is not None and int(last) != delivered:
                    raise _Missing("a message was lost")
                yield _Read()  # what was still to come has gone meanwhile, written anew or too old
                continue
            delivered += 1
            place = message.metadata
            if place.sequence.consumer != delivered:
                raise _Missing(f"gap before {place.sequence.consumer}")
            yield _Read(place.sequence.stream, message.data, message.subject, place.timestamp, place.num_pending)
    except (nats.errors.Error, _Missing) as error:
        raise Unavailable(f"{subject} cannot be read: {error or type(error).__name__}") from error
    finally:
        off()
        forget(bus, stream, asked)
        if subscription is not None:
            await subscription.unsubscribe()


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
        if message.reply.startswith(_STORED):
            self._sent = True
        elif (status := (message.headers or {}).get("Status")) != _HEARTBEAT:
            await self._answered(f"{status} {(message.headers or {}).get('Description', '')}")
            return
        if self._bytes + _nbytes(message) > QUEUED_BYTES:
            self.end("more came than was asked for")
            return
        self._bytes += _nbytes(message)
        self._waiting.append(message)
        self._news.set()
        self._left -= _counted(message)
        if not self._left:  # JetStream says nothing of that, and sends no more
            await self._answered("")

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
        """Raises ``_Missing``."""
        await self._more()
        while not self._waiting:
            if self._ended:
                raise _Missing(self._ended)
            self._news.clear()
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._news.wait()
            except TimeoutError:
                raise _Missing("no heartbeat") from None
        message = self._waiting.popleft()
        self._bytes -= _nbytes(message)
        return message


def _nbytes(message: Msg) -> int:
    return len(message.data) + MESSAGE_BYTES


def _counted(message: Msg) -> int:
    """What JetStream counts of it towards the bytes that were asked for."""
    headers = message.headers or {}
    lines = sum(len(name) + len(value) + 4 for name, value in headers.items()) + 12 if headers else 0
    return len(message.subject) + len(message.reply) + lines + len(message.data)


def _config(subject: str | Sequence[str], since: float | None, after: int) -> ConsumerConfig:
    config = consumer(None, subject, DeliverPolicy.ALL)
    if after:
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
    if since is not None:
        start = datetime.fromtimestamp(since, UTC)
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=start)
    return config
