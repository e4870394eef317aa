"""The reliable store: records in one JetStream KV bucket, written by the leading controller alone.

Every write of the leader carries the sequence of the ``term`` key, so a deposed controller writes nothing any more
(a key's own revision would not fence it). Nor does a copy of a write that comes late: where there was no answer, the
next write moves the fence first, by writing the same term again (docs/decisions/0052). Writes go one at a time: with
replicas a second one in flight on the same fence is refused with the same error as a lost election.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from typing import Self, TypeVar

import msgspec
import nats.errors
import nats.js.errors
from nats.js.api import RawStreamMsg

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.streams import (
    STATE_STREAM,
    STORE_FAILED,
    WITHIN_S,
    WRONG_SEQUENCE,
    await_streams,
    ensure_streams,
)
from sllm_runtime.platform.watch import Last, Watch, is_deletion, last_messages
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import NotStorable, ProtocolError, StaleTerm, StoreFull, Unavailable
from sllm_runtime.protocol.limits import KIB, MIB
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.records import Term
from sllm_runtime.protocol.subjects import STATE, TERM_KEY

log = logging.getLogger(__name__)

T = TypeVar("T")

_SUBJECT = f"$KV.{STATE}."
_FOR_GOOD = (10054, 10097)
"""The stream takes no message, or no headers, of that size."""
_HEADERS = 4 * KIB
"""What the headers of a write take at most."""
_AGAIN_S = 0.05
_WRITE_S = 10.0
_TRY_S = 1.0
"""One try of a write: what was in flight when the server died is written again after this (it changes nothing)."""
_WHOLE_S = 15.0
"""How long a server that lags has to catch up, or another one to be asked."""
_LAGS_S = 0.25
_FOR_WHAT_RUNS = 1 / 4
"""Of the stream: what new versions, models and secrets leave to terms, leases, routes, instances and deletions."""
_MARKER_TTL = "3600"
"""Seconds that a deletion stays visible in the stream; watches that were away longer see it by comparing."""


class Records:
    """All records of one moment. Raises ``ProtocolError`` as ``StateStore``."""

    def __init__(self, found: Mapping[str, bytes]) -> None:
        self._found = found

    def get(self, key: str, type_: type[T]) -> T | None:
        """The record at ``key``, ``None`` if there is none."""
        data = self._found.get(key)
        return None if data is None else _record(type_, key, data)

    def keys(self, prefix: str) -> set[str]:
        """All keys that begin with ``prefix``."""
        return {key for key in self._found if key.startswith(prefix)}

    def list(self, prefix: str, type_: type[T]) -> dict[str, T]:
        """All records whose key begins with ``prefix``, by key."""
        return {key: _record(type_, key, data) for key, data in self._found.items() if key.startswith(prefix)}

    def readable(self, prefix: str, type_: type[T]) -> dict[str, T]:
        """As ``list``, of what is made anew where it lacks: what is no such record is logged, and left out."""
        found = {}
        for key, data in self._found.items():
            if key.startswith(prefix):
                try:
                    read = codec.from_json(type_, data)
                except ProtocolError as error:
                    log.error("record %s is left out: %s", key, error.message)
                else:
                    found[key] = codec.served(read, f"record {key}")
        return found


class StateStore:
    """The bucket. Anyone may read and watch; ``elect`` makes this process its only writer."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._lock = asyncio.Lock()
        self._fence: int | None = None
        self._unanswered: int | None = None
        """The fence that a write has which nobody has answered: it may still come, as long as the fence is this one."""
        self._newest = 0
        """The sequence of the last write that was answered: the next one's is greater, or the store was set back."""
        self._term = 0
        self._controller = ""
        self._watches: list[Watch] = []

    @classmethod
    async def open(
        cls, bus: Bus, *, create: bool, replicas: int = 1, bundle_bytes: int = 0, within_s: float = WITHIN_S
    ) -> Self:
        """The store; ``create`` makes the streams, as ``ensure_streams`` does, otherwise they are waited for.

        Raises ``Unavailable`` after ``within_s`` seconds.
        """
        if create:
            await ensure_streams(bus, replicas, bundle_bytes=bundle_bytes, within_s=within_s)
        else:
            await await_streams(bus, within_s=within_s)
        return cls(bus)

    # --- reading ----------------------------------------------------------------------------------
    async def get(self, key: str, type_: type[T], *, direct: bool = True) -> T | None:
        """The record at ``key``, ``None`` if there is none; with ``direct=False`` as the stream's leader has it, which
        no replica that lags can answer. Raises ``Unavailable``, ``ProtocolError``."""
        message = await self._read(key, direct=direct)
        return None if message is None else _record(type_, key, message.data or b"")

    async def _read(self, key: str, *, direct: bool = True) -> RawStreamMsg | None:
        try:
            message = await self._bus.jetstream.get_last_msg(STATE_STREAM, _SUBJECT + key, direct=direct)
        except nats.js.errors.NotFoundError:
            return None
        except nats.errors.Error as error:
            raise Unavailable(f"the state cannot be read ({key}): {_text(error)}") from error
        return None if is_deletion(message.headers) else message

    async def list(self, prefix: str, type_: type[T]) -> dict[str, T]:
        """All records whose key begins with ``prefix`` (``"functions."``), by key. Raises ``Unavailable``."""
        pattern = prefix if prefix.endswith(">") else prefix.rstrip(".") + ".>"
        found = await last_messages(self._bus, STATE_STREAM, _SUBJECT + pattern)
        return _records(found).list("", type_)

    async def everything(self, within_s: float = _WHOLE_S) -> Records:
        """All records as they were when this process was elected, or later. Raises ``StaleTerm``, ``Unavailable`` after
        ``within_s`` seconds.

        With replicas any server of the stream may be the one that answers, also one that is catching up. What has
        this process's own term has all that was written before it, and what came after is its own.
        """
        why, until = "no server answers", time.monotonic() + within_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while time.monotonic() < until:  # a wait of the client may swallow that the time is over (gh-86296)
                    try:
                        found = await last_messages(self._bus, STATE_STREAM, f"{_SUBJECT}>")
                        term = found.get(_SUBJECT + TERM_KEY)
                        if term is not None and term.sequence == self._fence:
                            return _records(found)
                        await self.confirm()
                        why = f"a server lags: it does not have term {self._term} yet"
                    except Unavailable as error:
                        why = error.message
                    log.info("the state is read again: %s", why)
                    await asyncio.sleep(_LAGS_S)
        raise Unavailable(f"the state cannot be read (asked for {within_s:g} s): {why}")

    async def watch(self, pattern: str, type_: type[T], on_change: Callable[[str, T | None], None]) -> Watch:
        """Call ``on_change(key, record)`` for every record that matches now, before this returns, and for every
        change after; ``None`` is a deletion. After an outage only what has changed is told, deletions too.

        A record that cannot be read is logged and left out. Raises ``Unavailable`` if nothing comes within 10 s.
        """

        def changed(subject: str, data: bytes | None) -> None:
            key = subject.removeprefix(_SUBJECT)
            try:
                record = None if data is None else _record(type_, key, data)
            except ProtocolError as error:
                log.error("record %s cannot be read and is left out: %s", key, error.message)
                return
            on_change(key, record)

        watch = Watch(self._bus, STATE_STREAM, _SUBJECT + pattern, changed)
        self._watches.append(watch)
        await watch.start()
        return watch

    # --- writing ----------------------------------------------------------------------------------
    @property
    def term(self) -> int:
        """The term of this process; 0 before ``elect``."""
        return self._term

    async def elect(self, controller: str, *, over: int | None = None, least: int = 1) -> int:
        """Become the only writer: a new term, which fences every earlier one. Returns it. With ``over`` only if that is
        the term until now: raises ``StaleTerm`` where another one was faster. ``least``: no term is below it. Raises
        ``Unavailable``."""
        async with self._lock:
            self._controller = controller
            self._newest = 0  # what was written before counts no more: all is read anew
            deadline = time.monotonic() + _WRITE_S
            asked: Term | None = None
            while True:
                last, sequence = await self._last_term()
                if last is not None and last == asked:
                    # It was written, and only the answer was lost. Nobody else has this name.
                    self._fence, self._term = sequence, last.term
                    return last.term
                term = last.term if last is not None else 0
                if over is not None and term != over:
                    raise StaleTerm(f"{controller} was not elected over term {over}: term {term} leads")
                asked = Term(term=max(term + 1, least), controller=controller)
                headers = {"Nats-Expected-Last-Subject-Sequence": str(sequence)}
                try:
                    self._fence = await self._publish(TERM_KEY, codec.to_json(asked), headers)
                except _Refused:
                    continue  # another one was faster: above it, then
                except Unavailable:
                    if time.monotonic() > deadline:
                        raise
                    await asyncio.sleep(_AGAIN_S)
                    continue
                self._term = asked.term
                return asked.term

    async def _last_term(self) -> tuple[Term | None, int]:
        message = await self._read(TERM_KEY, direct=False)
        if message is None:
            return None, 0
        return codec.from_json(Term, message.data or b""), message.seq or 0

    async def put(self, key: str, record: msgspec.Struct) -> None:
        """Write ``record``. Raises ``StaleTerm`` if another controller leads, ``NotStorable`` if no try could help,
        ``StoreFull`` at once, ``Unavailable`` after 10 s."""
        await self._write(key, codec.to_json(record), {})

    async def delete(self, key: str) -> None:
        """Remove ``key``; nothing happens if it is not there. Raises as ``put``."""
        try:
            await self._write(key, b"", {"KV-Operation": "PURGE", "Nats-Rollup": "sub", "Nats-TTL": _MARKER_TTL})
        except StoreFull:  # a full stream takes what is smaller than what it replaces; this replaces nothing
            if await self._read(key, direct=False) is not None:
                raise

    async def require_room(self) -> None:
        """Before something is begun that stays and that people can do without: a version, a model, a secret. Raises
        ``StoreFull`` where what is left is for what runs, ``Unavailable``."""
        try:
            info = await self._bus.jetstream.stream_info(STATE_STREAM)
        except nats.errors.Error as error:
            raise Unavailable(f"the state's room cannot be read: {_text(error)}") from error
        used, limit = info.state.bytes, info.config.max_bytes or 0
        if 0 < limit < used + limit * _FOR_WHAT_RUNS:
            raise StoreFull(
                f"{STATE_STREAM} holds {used / MIB:.1f} of {limit / MIB:.1f} MiB of records, and what is left is for"
                " what runs: delete functions, models or secrets that nobody needs"
            )

    async def _write(self, key: str, data: bytes, headers: dict[str, str]) -> None:
        deadline = time.monotonic() + _WRITE_S
        while True:
            try:
                await self._write_once(key, data, headers)
                return
            except StoreFull:
                raise
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def put_once(self, key: str, record: msgspec.Struct, asks: Callable[[], None] = lambda: None) -> None:
        """``put`` in one try of two seconds at most: for what is soon written again. ``asks`` is called when it is its
        turn, behind other writes: what is answered was so then. Raises as ``put``."""
        await self._write_once(key, codec.to_json(record), {}, asks)

    async def _write_once(
        self, key: str, data: bytes, headers: dict[str, str], asks: Callable[[], None] = lambda: None
    ) -> None:
        async with self._lock:
            if self._fence is None:
                raise StaleTerm(f"{key} was not written: this controller does not lead")
            if self._unanswered == self._fence:
                await self._move_fence(key)
            fenced = headers | {
                "Nats-Expected-Last-Subject-Sequence": str(self._fence),
                "Nats-Expected-Last-Subject-Sequence-Subject": _SUBJECT + TERM_KEY,
            }
            asks()
            try:
                await self._publish(key, data, fenced)
            except _Refused as error:
                # By a lost election, or only by a write still in flight?
                await self._require_term(key)
                raise Unavailable(f"{key} was not written: {error}") from error

    async def _move_fence(self, key: str) -> None:
        """The same term again, which is another sequence: what is on its way behind the old one is refused. Raises
        ``StaleTerm``, ``Unavailable``."""
        term = Term(term=self._term, controller=self._controller)
        headers = {"Nats-Expected-Last-Subject-Sequence": str(self._fence)}
        try:
            self._fence = await self._publish(TERM_KEY, codec.to_json(term), headers)
        except _Refused as error:
            before = self._fence
            await self._require_term(key)
            if self._fence == before:  # something is still in flight
                raise Unavailable(f"{key} was not written: {error}") from error

    async def confirm(self) -> None:
        """Make sure that this process still leads, by reading alone: also on a full disk. Raises ``StaleTerm``,
        ``Unavailable``."""
        await self._require_term(TERM_KEY)

    async def _require_term(self, key: str) -> None:
        """Raises ``StaleTerm`` if another one has been elected."""
        asked = self._fence
        last, sequence = await self._last_term()
        if self._fence is not None and last == Term(term=self._term, controller=self._controller):
            # It was moved, and only the answer was lost; or the store was set back, as the next write's answer says.
            # One that was moved while this was read is newer than that.
            self._fence = sequence if self._fence == asked else self._fence
        elif sequence != self._fence:
            self._fence = None
            leads = last.term if last is not None else 0
            raise StaleTerm(f"{key} was not written: term {leads} leads, this controller had {self._term}")

    def _require_growth(self, key: str, sequence: int) -> None:
        """Raises ``StaleTerm`` where a write's sequence is none that is new: the store was set back to an earlier state
        of this term (a backup, disks that lost their power). It lacks what this process takes for stored, of which it
        would never tell anybody else: who is elected next begins with what is there."""
        if sequence <= self._newest:
            self._fence = None
            raise StaleTerm(
                f"{STATE_STREAM} was set back to an earlier state: {key} is its message {sequence}, after"
                f" {self._newest}; term {self._term} ends, and the state is read anew"
            )
        self._newest = sequence

    async def _publish(self, key: str, data: bytes, headers: dict[str, str]) -> int:
        most = self._bus.max_payload - _HEADERS
        if len(data) > most:  # the server would end the connection for it
            raise _not_storable(key, f"it has {show_bytes(len(data))}, {show_bytes(most)} fit")
        fence = self._fence  # of this write, whatever is read meanwhile
        try:
            answer = await self._bus.jetstream.publish(_SUBJECT + key, data, timeout=_TRY_S, headers=headers)
        except nats.js.errors.APIError as error:
            if error.err_code in WRONG_SEQUENCE:
                raise _Refused(error.description) from error
            if error.err_code in _FOR_GOOD:
                raise _not_storable(key, f"it has {show_bytes(len(data))}: {error.description}") from error
            if error.err_code == STORE_FAILED:
                raise StoreFull(f"{key} was not written: {STATE_STREAM}: {error.description}") from error
            raise Unavailable(f"{key} was not written: {error.description}") from error
        except nats.js.errors.NoStreamResponseError as error:  # nobody has it
            raise Unavailable(f"{key} was not written: {_text(error)}") from error
        except nats.errors.Error as error:
            self._unanswered = fence
            raise Unavailable(f"{key} was not written: {_text(error)}") from error
        except asyncio.CancelledError:
            self._unanswered = fence
            raise
        self._require_growth(key, answer.seq)
        return answer.seq

    async def close(self) -> None:
        """End all watches."""
        for watch in self._watches:
            await watch.close()


def _record(type_: type[T], key: str, data: bytes) -> T:
    """What stands at ``key``; fields that are unknown here are left out. Raises ``ProtocolError``, also for a schema
    that is not this one or the one before: what it means is not known."""
    try:
        read = codec.from_json(type_, data)
    except ProtocolError as error:
        raise ProtocolError(f"record {key} cannot be read: {error.message}") from error
    return codec.served(read, f"record {key}")


def _records(found: Mapping[str, Last]) -> Records:
    return Records({subject.removeprefix(_SUBJECT): each.data for subject, each in found.items()})


class _Refused(Exception):
    """The fence does not hold: error 10071."""


def _not_storable(key: str, why: str) -> NotStorable:
    return NotStorable(f"record {key} cannot be stored: {why}; make what it describes smaller")


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__
