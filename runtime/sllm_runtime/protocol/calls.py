"""The journal of a call: what was asked, what came of it, how it ended. Entries in streams, each under a subject of its
own, so that writing one again changes nothing; a call is what its entries say, put together by ``Journaled``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.frames import Frame, Usage
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.records import Record
from sllm_runtime.protocol.states import CallState

PREFIX: Final = "call-"
"""What the id of every call begins with."""
JOURNAL_TTL_S: Final = 300.0
"""A call can be read for so long after its end."""
RESUME_WINDOW_S: Final = 60.0
"""A call that is not ``durable`` goes on for so long without a reader."""
KNOWN_S: Final = 3600.0
"""A call is known for so long after its journal is gone."""
READING_S: Final = 10.0
"""A reader says so this often."""


class CallOrder(Record, frozen=True, kw_only=True, tag="order"):
    """What was asked; the body travels in ``BodyPart``. ``gateway`` runs it, in its ``life``: whoever takes it over
    writes this entry anew, and every other entry depends on the one that its writer knows (a fence)."""

    call: str
    function: str
    version: int
    kind: Literal["fn", "chat", "completion"]
    seed: int
    parts: int
    """Of the body."""
    gateway: str
    durable: bool
    """``Prefer: respond-async``: it is written to disk, and goes on to its end without a reader."""
    created: float
    """Unix seconds; for people, and the date in its prompt (``frames.CallHead``)."""
    traceparent: str = ""
    model: str = ""
    """As an OpenAI request named it."""
    usage: bool = False
    choices: int = 1
    streams: bool | None = None
    """``Handler.streams`` of its version; None in entries of earlier releases: then the version itself says so."""
    key: str = ""
    """Of its ``KeyClaim``, with that one's ``body``."""
    key_body: bytes = b""
    life: str = ""
    """As ``lives.Life`` names it; empty in entries of earlier releases."""
    delivered: int = 0
    """Of a stream whose gateway died: so many outputs its caller may have had. They are not in the journal, but made
    again, and must be the same: ``delivered_hash`` as in ``frames.CallHead``."""
    delivered_hash: bytes = b""
    tracestate: str = ""

    @property
    def claim(self) -> KeyClaim:
        """Of its key."""
        return KeyClaim(call=self.call, body=self.key_body)

    @property
    def claim_begun(self) -> KeyClaim:
        """The same, once this order is written."""
        return KeyClaim(call=self.call, body=self.key_body, begun=True)


class BodyPart(Record, frozen=True, tag="body"):
    number: int
    data: bytes


class Began(Record, frozen=True, kw_only=True, tag="began"):
    """An instance has it. ``numerics``: its fingerprint; ``epoch``: no smaller one is used again; ``exact``: as
    ``RouteEntry`` has it, of all instances so far that the answer is of."""

    at: float
    numerics: str
    epoch: int
    instance: str = ""
    exact: bool = True


class Batch(Record, frozen=True, tag="batch"):
    """Frames of the answer, whole values only, in order. Their first is the ``first``-th of the call."""

    first: int
    frames: tuple[Frame, ...]


class Ended(Record, frozen=True, kw_only=True, tag="ended"):
    """``frames``: of the answer, that were written; -1: its writer did not know, or is of an earlier release."""

    at: float
    state: CallState
    error: ErrorBody | None = None
    usage: Usage | None = None
    frames: int = -1
    yielded: bool | None = None
    """As ``End`` has it."""


class Kept(Record, frozen=True, kw_only=True, tag="kept"):
    """Stands for JOURNAL_TTL_S from the end: while it does, the answer can be read."""


class CancelAsked(Record, frozen=True, kw_only=True, tag="cancel"):
    """Somebody wants it ended, and its gateway was not there."""


Entry = CallOrder | BodyPart | Began | Batch | Ended | Kept | CancelAsked


def entry_name(kind: type[Entry], number: int | None = None) -> str:
    """What an entry is written under in its call's journal: its tag, and its ``number`` where a call has several."""
    tag = kind.__struct_config__.tag
    return str(tag) if number is None else f"{tag}-{number}"


class KeyClaim(Record, frozen=True, kw_only=True):
    """The call that an ``Idempotency-Key`` stands for. ``body``: BLAKE2b of what was asked. ``begun``: its order was
    written, so it may have run, whatever is left of it (an earlier release does not say so). ``refused``: it never will
    be, and whoever asks next has the key."""

    call: str
    body: bytes
    begun: bool = False
    refused: bool = False


class CancelCall(msgspec.Struct, frozen=True, kw_only=True):
    """Request to all gateways; only the one that has the call answers."""

    call: str


class ExplainCall(msgspec.Struct, frozen=True, kw_only=True):
    """Request to all gateways; only the one that has the call, or had it of late, answers: ``CallTold``."""

    call: str


class CallTold(msgspec.Struct, frozen=True, kw_only=True):
    """What a gateway knows of a call. ``started``: the instance whose start it waited for; ``instance``: where it runs,
    or ran last. ``timeline`` as in a stream's comment. ``waits``: what for, in words, while it does, and ``progress``
    for who reads its stream elsewhere. ``created``: as ``CallOrder`` has it. ``tokens``: that came so far, where ids
    are kept or it has ended."""

    call: str
    function: str
    version: int
    state: CallState
    instance: str = ""
    started: str = ""
    timeline: str = ""
    error: str = ""
    waits: str = ""
    progress: Progress | None = None
    created: float = 0.0
    gateway: str = ""
    tokens: int = 0


class ListCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Which calls are open at a gateway: the newest ``limit``, of those older than ``after`` (``place_of``; empty: of
    all). ``function`` and ``state``: empty for any."""

    limit: int
    function: str = ""
    state: str = ""
    after: str = ""


class CallsTold(msgspec.Struct, frozen=True, kw_only=True):
    """The newest first, as many as fit one message; none: there are no more."""

    calls: tuple[CallTold, ...]


def place_of(created: float, call: str) -> str:
    """Sorts calls by when they were made."""
    return f"{created:020.6f}-{call}"


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """Somebody reads this call at some gateway."""

    call: str


@dataclass
class Journaled:
    """What the entries of one call say. ``take`` them in any order: a write that was repeated while a server stood
    still may be stored again behind what was written after it. Repeated ones change nothing."""

    order: CallOrder | None = None
    began: Began | None = None
    ended: Ended | None = None
    kept: bool = False
    cancelled: bool = False
    frames: int = 0
    """Of the answer, so far."""
    batches: int = 0
    written: int = 0
    """Frames of the answer up to the end of its furthest batch: more than ``frames`` where one before that is gone."""
    _parts: dict[int, bytes] = field(default_factory=dict)
    _early: dict[int, tuple[Frame, ...]] = field(default_factory=dict)
    """Batches behind one that has not come yet, by their first frame."""

    def take(self, entry: Entry) -> tuple[Frame, ...]:
        """Take it in; frames that are new, in order."""
        match entry:
            case CallOrder():
                self.order = entry
            case BodyPart(number, data):
                self._parts[number] = data
            case Began():
                self.began = entry if self.began is None or entry.epoch >= self.began.epoch else self.began
            case Batch(first, frames):
                self.batches += 1
                self.written = max(self.written, first + len(frames))
                self._early[first] = frames
                return self._in_order()
            case Ended():
                self.ended = entry
            case Kept():
                self.kept = True
            case CancelAsked():
                self.cancelled = True
        return ()

    def _in_order(self) -> tuple[Frame, ...]:
        """Of what has come the frames that follow those before."""
        found: list[Frame] = []
        while (first := min(self._early, default=self.frames + 1)) <= self.frames:
            new = self._early.pop(first)[self.frames - first :]
            self.frames += len(new)
            found += new
        return tuple(found)

    def take_all(self, entries: Iterable[Entry]) -> list[Frame]:
        """All of them; the frames of the answer."""
        return [frame for entry in entries for frame in self.take(entry)]

    @property
    def state(self) -> CallState:
        if self.ended is not None:
            return self.ended.state
        return CallState.QUEUED if self.began is None else CallState.RUNNING

    @property
    def total(self) -> int:
        """Frames of the answer, as far as what is left says: its end tells of those whose batches are all gone."""
        return max(self.written, self.ended.frames if self.ended is not None else -1)

    @property
    def whole(self) -> bool:
        """Whether nothing of the answer so far is gone."""
        return self.frames >= self.total

    @property
    def exact(self) -> bool:
        """False: an instance that it had cannot promise that the same tokens come again."""
        return self.began is None or self.began.exact

    @property
    def body(self) -> bytes | None:
        """The request's body; None while parts of it are missing."""
        if self.order is None or len(self._parts) < self.order.parts:
            return None
        return b"".join(self._parts[number] for number in range(self.order.parts))
