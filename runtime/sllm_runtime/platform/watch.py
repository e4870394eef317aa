"""Watching a stream's last messages: an ephemeral consumer, made anew whenever it may have missed something.

nats-py's own recovery of a watch takes about 18 s after a restart of the server; here a reconnect, a gap in the
delivery numbers or a missing heartbeat makes a new consumer at once, and its first picture is compared with the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from nats.js.api import DeliverPolicy

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.consumers import consumer
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.reader import Lost, Reader
from sllm_runtime.platform.telemetry import Once
from sllm_runtime.protocol.errors import SllmError, Unavailable

log = logging.getLogger(__name__)

_SYNC_S: Final = 10.0
_AGAIN_S: Final = 0.1
_LAGS_S: Final = 5.0
"""How long a server that lags has to catch up, or another one to be asked."""
_TOLD_AGAIN_S: Final = (0.1, 0.5, 2.0, 5.0)
"""Waits before what a listener failed to take is told once more; the last one goes on."""

Changed = Callable[[str, bytes | None], None]


def is_deletion(headers: Mapping[str, str] | None) -> bool:
    """Whether a message of a KV bucket says that its key is gone."""
    if not headers:
        return False
    return headers.get("KV-Operation") in ("DEL", "PURGE") or "Nats-Marker-Reason" in headers


class _Picture:
    """One consumer's life: the last message of each subject, then every new one."""

    def __init__(self, bus: Bus, stream: str, subject: str) -> None:
        self._reader = Reader(bus, stream, consumer(subject, DeliverPolicy.LAST_PER_SUBJECT))
        self.pending = 0
        """Messages of the first picture that are still to come."""

    async def open(self) -> None:
        """Make the consumer. Raises ``Unavailable``."""
        self.pending = await self._reader.open()

    async def next(self) -> tuple[str, int, bytes | None] | None:
        """The next (subject, sequence, data or ``None`` for a deletion); ``None``: the first picture ended without the
        messages it was to have, since they have gone meanwhile. Raises ``Lost``."""
        while (message := await self._reader.next()) is None:
            if self.pending:
                self.pending = 0
                return None
        place = message.metadata
        self.pending = min(self.pending, place.num_pending) if self.pending else 0
        data = None if is_deletion(message.headers) else message.data
        return message.subject, place.sequence.stream, data

    async def close(self) -> None:
        await self._reader.close()


class Watch:
    """Tells every change under one filter subject. ``start`` returns when the present state was told.

    What ``changed`` raises on is logged and told again until it is taken; other subjects do not wait for it.
    """

    def __init__(self, bus: Bus, stream: str, subject: str, changed: Changed) -> None:
        self._bus = bus
        self._stream, self._subject = stream, subject
        self._changed = changed
        self._tasks = Tasks(f"watch {subject}")
        self._known: dict[str, int] = {}
        self._life: asyncio.Task[None] | None = None
        self._off: Callable[[], None] = lambda: None
        self._failures = 0
        self._lags: float | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._why = Once(log)
        """Why it is made anew, until it is whole again."""
        self.synced = asyncio.Event()
        """Set while what was told is a whole picture."""

    async def start(self) -> None:
        """Begin, and wait until the present state was told. Raises ``Unavailable`` after 10 s."""
        self._off = self._bus.on_reconnect(self._anew)
        self._tasks.start(self._run(), "run")
        try:
            async with asyncio.timeout(_SYNC_S):
                await self.synced.wait()
        except TimeoutError:
            await self.close()
            raise Unavailable(f"{self._subject} cannot be watched: nothing came within {_SYNC_S:g} s") from None

    async def close(self) -> None:
        """End it. Repeatable."""
        self._off()
        if self._retry is not None:
            self._retry.cancel()
        await self._tasks.close()

    def _anew(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self.synced.clear()
        if self._life is not None:
            self._life.cancel()

    async def _run(self) -> None:
        while True:
            self._life = self._tasks.start(self._live(), "consumer")
            await asyncio.wait([self._life])
            self.synced.clear()
            if not self._life.cancelled():
                await asyncio.sleep(_AGAIN_S)

    async def _live(self) -> None:
        picture = _Picture(self._bus, self._stream, self._subject)
        try:
            await picture.open()
            await self._follow(picture)
        except Lost as reason:
            self._why.say(logging.INFO, f"watching {self._subject} anew: {reason}")
        except SllmError as error:
            self._why.say(logging.WARNING, f"{error.message}; trying again")
        finally:
            await picture.close()

    async def _follow(self, picture: _Picture) -> None:
        first: dict[str, tuple[str, int, bytes | None]] = {}
        while picture.pending:
            news = await picture.next()
            if news is not None:
                first[news[0]] = news
        self._require_current(first)
        for news in first.values():
            self._tell(*news)
        for subject in set(self._known) - first.keys():
            self._tell(subject, 0, None)
        if self._retry is None:
            self._failures = 0
            self._why.over()
            self.synced.set()
        while True:
            news = await picture.next()
            if news is not None:
                self._tell(*news)

    def _require_current(self, first: Mapping[str, tuple[str, int, bytes | None]]) -> None:
        """With replicas any server of the stream may be the one that answers, also one that is catching up: what was
        told of one that had more is no longer there then. Raises ``Lost``; for _LAGS_S, since a store may be replaced
        by an older copy."""
        subject, newest = max(self._known.items(), key=lambda known: known[1], default=("", 0))
        _, found, _ = first.get(subject, ("", 0, None))
        now = asyncio.get_running_loop().time()
        if found >= newest:
            self._lags = None
            return
        self._lags = now if self._lags is None else self._lags
        if now - self._lags < _LAGS_S:
            raise Lost("a server lags")

    def _tell(self, subject: str, sequence: int, data: bytes | None) -> None:
        if data is None:
            if subject in self._known and self._taken(subject, None):
                del self._known[subject]
        elif self._known.get(subject) != sequence and self._taken(subject, data):
            self._known[subject] = sequence

    def _taken(self, subject: str, data: bytes | None) -> bool:
        """Whether the listener has taken it. If not, a new picture soon tells it what it does not know yet."""
        try:
            self._changed(subject, data)
        except Exception:  # whatever a listener raises must not cost others their news, nor this one its next chance
            log.exception("a change of %s was not taken; it is told again", subject)
            if self._retry is None:
                delay = _TOLD_AGAIN_S[min(self._failures, len(_TOLD_AGAIN_S) - 1)]
                self._failures += 1
                self._retry = asyncio.get_running_loop().call_later(delay, self._anew)
            return False
        return True


class Last(NamedTuple):
    """The last message of a subject."""

    sequence: int
    data: bytes


async def snapshot(bus: Bus, stream: str, subject: str) -> dict[str, bytes]:
    """What the last message of every subject under ``subject`` says, as ``last_messages``."""
    return {name: found.data for name, found in (await last_messages(bus, stream, subject)).items()}


async def last_messages(bus: Bus, stream: str, subject: str) -> dict[str, Last]:
    """The last message of every subject under ``subject``, deletions left out, as one of the stream's servers has them:
    with replicas it may lag. Raises ``Unavailable``."""
    found: dict[str, Last] = {}
    picture = _Picture(bus, stream, subject)
    try:
        async with asyncio.timeout(_SYNC_S):
            await picture.open()
            while picture.pending:
                news = await picture.next()
                if news is not None and news[2] is not None:
                    found[news[0]] = Last(news[1], news[2])
    except (Lost, TimeoutError) as error:
        raise Unavailable(f"{subject} cannot be listed: {str(error) or 'no answer'}") from error
    finally:
        await picture.close()
    return found
