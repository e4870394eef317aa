"""Reads a JetStream stream in order and goes on with what comes; begins anew after the last where anything is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import nats.errors
from nats.js.api import ConsumerConfig, DeliverPolicy

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.consumers import consumer
from sllm_runtime.platform.reader import Lost, Reader
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)

AGAIN_S = 0.2


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
    reader = Reader(bus, stream, _config(subject, since, after))
    try:
        if not await reader.open():
            yield _Read()
        while True:
            message = await reader.next()
            if message is None:
                yield _Read()  # what was still to come has gone meanwhile, written anew or too old
                continue
            place = message.metadata
            yield _Read(place.sequence.stream, message.data, message.subject, place.timestamp, place.num_pending)
    except Lost as error:
        raise Unavailable(f"{subject} cannot be read: {error}") from error
    finally:
        await reader.close()


def _config(subject: str | Sequence[str], since: float | None, after: int) -> ConsumerConfig:
    config = consumer(subject, DeliverPolicy.ALL)
    if after:
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
    if since is not None:
        start = datetime.fromtimestamp(since, UTC)
        return config.evolve(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=start)
    return config
