"""The journals of calls in JetStream: entries are acknowledged, and read in order from any gateway."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, Final, cast

from sllm_gateway.errors import KEY
from sllm_gateway.follow import messages
from sllm_gateway.room import FOR_ANSWERS, FOR_ENDS, Room
from sllm_gateway.stored import Changed, Last, Stored
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.watch import snapshot
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.calls import (
    JOURNAL_TTL_S,
    KNOWN_S,
    READING_S,
    Batch,
    Began,
    BodyPart,
    CallOrder,
    CancelAsked,
    Ended,
    Entry,
    Journaled,
    Kept,
    KeyClaim,
    entry_name,
)
from sllm_runtime.protocol.errors import (
    CallMoved,
    CallNotFound,
    Conflict,
    InvalidArgument,
    JournalExpired,
    ProtocolError,
    StoreFull,
    Unavailable,
)
from sllm_runtime.protocol.subjects import (
    BODIES_STREAM,
    CALLS_STREAM,
    JOURNAL_STREAM,
    KEYS_STREAM,
    call_entries,
    call_entry,
    key_claim,
)

log = logging.getLogger(__name__)

STREAMS: Final = (JOURNAL_STREAM, CALLS_STREAM)
SILENT: Final = "this one did not run for a while"
"""Why another gateway has a call."""
TOGETHER: Final = 500
"""Entries that are read in one turn of the loop: some 2 ms."""
CLAIMED_S: Final = 60.0
"""A key is taken for so long before its call is known: then its gateway has died between the two."""


def digest(*parts: bytes) -> bytes:
    """BLAKE2b over parts that cannot run into each other."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return found.digest()


class Journal:
    """All journals. Everything raises ``Unavailable`` when JetStream does not answer within ELECTION_S."""

    def __init__(self, bus: Bus, stored: Stored, clock: Callable[[], float] = time.monotonic) -> None:
        self._bus = bus
        self._stored = stored
        self._clock = clock
        self._room = Room(stored, clock)

    # --- writing ----------------------------------------------------------------------------------
    async def write(
        self,
        stream: str,
        call: str,
        entry: Entry,
        keep_s: float,
        order: int | None = None,
        *,
        number: int | None = None,
    ) -> int:
        """Write ``entry``, of whose kind a call has one or, by ``number``, several; it stands for ``keep_s`` seconds.
        Written again it changes nothing.

        ``order``: sequence of the call's order as its writer knows it, 0: there is none any more. Raises ``CallMoved``
        where there is a later one, ``JournalExpired`` where it is gone: nobody has the call then. A durable call's
        answer leaves room for the ends of all: raises ``StoreFull``.
        """
        if isinstance(entry, Batch) and stream == CALLS_STREAM:
            await self._room.require(stream, sum(len(frame.data) for frame in entry.frames), FOR_ENDS)
        where = Last(stream, _place(stream, call, CallOrder), order) if order is not None else None
        try:
            return await self._stored.write(
                _place(stream, call, type(entry), number), entry, keep_s=keep_s, where=where
            )
        except Changed:
            await self.require(stream, call)
            raise moved(call) from None
        except StoreFull as error:
            raise StoreFull(f"{stream} is full: {error.message}") from None

    async def require(self, stream: str, call: str) -> None:
        """Raises ``JournalExpired`` where there is no order of the call: what was read of it will not go on."""
        if await self._stored.last(stream, _place(stream, call, CallOrder)) is None:
            raise expired(call)

    async def admit(self, order: CallOrder, nbytes: int) -> None:
        """Raises ``StoreFull`` where a call with so large a body has no room now."""
        await self._room.require(BODIES_STREAM, nbytes)
        if order.durable:
            await self._room.require(CALLS_STREAM, 0, FOR_ANSWERS)

    async def give_back(self, order: CallOrder) -> None:
        """Its body is not needed any more: ``order`` has ended, or was never begun. Empty parts take its place, which a
        full stream takes too, and go at once."""
        for number in range(order.parts):
            await self.write(BODIES_STREAM, order.call, BodyPart(number, b""), 1.0, number=number)

    async def begin(self, stream: str, mine: CallOrder, keep_s: float) -> int:
        """Write what is asked of a new call; the sequence of it. A copy of this write that a server hands on late finds
        it there, and does not make it another one, whose writer nobody would be. Raises ``CallMoved`` where another
        order of that call is there."""
        subject = _place(stream, mine.call, CallOrder)
        try:
            return await self._stored.write(subject, mine, keep_s=keep_s, where=Last(stream, subject, 0))
        except Changed:
            there = await self._stored.last(stream, subject)
        except StoreFull as error:
            raise StoreFull(f"{stream} is full: {error.message}") from None
        if there is None or order_of(there[1]) != mine:
            raise moved(mine.call)
        return there[0]

    async def create(self, stream: str, call: str, entry: Entry, keep_s: float, *, number: int | None = None) -> bool:
        """Write ``entry`` as ``write`` does, unless one is there. Whether it is what is there now."""
        subject = _place(stream, call, type(entry), number)
        try:
            await self._stored.write(subject, entry, keep_s=keep_s, where=Last(stream, subject, 0))
        except Changed:
            there = await self._stored.last(stream, subject)
            return there is not None and there[1] == codec.pack(entry)
        return True

    async def has(self, call: str) -> bool:
        """Whether a stream is a kept call, or was: who makes it one writes its order last."""
        for kind in (CallOrder, Ended):
            if await self._stored.last(JOURNAL_STREAM, _place(JOURNAL_STREAM, call, kind)) is not None:
                return True
        return False

    async def take_over(self, stream: str, known: CallOrder, mine: CallOrder, keep_s: float) -> int | None:
        """Rewrite the order ``known`` as ``mine``; its sequence. None: it is another gateway's meanwhile. After
        ``Unavailable`` it may be ``mine`` all the same: asked again, this says so."""
        subject = _place(stream, known.call, CallOrder)
        there = await self._stored.last(stream, subject)
        if there is not None and order_of(there[1]) == known != mine:
            where = Last(stream, subject, there[0])
            try:
                return await self._stored.write(subject, mine, keep_s=keep_s, where=where)
            except Changed:
                there = await self._stored.last(stream, subject)
        return there[0] if there is not None and order_of(there[1]) == mine else None

    # --- keys -------------------------------------------------------------------------------------
    async def claim(self, key: str, mine: KeyClaim) -> KeyClaim:
        """Whose key it is: ``mine``, or of the call that has it already. Raises ``InvalidArgument`` where that one was
        asked for something else, ``StoreFull`` where there is no room for more keys: see ``claimed`` before."""
        await self._room.require(KEYS_STREAM, 0, FOR_ENDS)
        subject, last = key_claim(key), 0
        for _ in range(3):
            try:
                await self._stored.write(subject, mine, keep_s=CLAIMED_S, where=Last(KEYS_STREAM, subject, last))
                return mine
            except Changed:
                there = await self._stored.last(KEYS_STREAM, subject)
            last = there[0] if there is not None else 0
            if (found := _stands(there, mine)) is not None:
                return found
        raise Unavailable("the Idempotency-Key cannot be claimed now; call again")

    async def claimed(self, key: str, mine: KeyClaim) -> KeyClaim | None:
        """Whose key it is, if a call has it. Raises ``InvalidArgument`` as ``claim``."""
        return _stands(await self._stored.last(KEYS_STREAM, key_claim(key)), mine)

    async def hold(self, key: str, claim: KeyClaim, keep_s: float) -> None:
        """The key stands for ``claim`` for so long from now, also where it lapsed and nobody else has claimed it.
        Raises ``Conflict`` where it is another call's."""
        subject = key_claim(key)
        for _ in range(2):
            there = await self._stored.last(KEYS_STREAM, subject)
            if there is not None and not _is_of(there[1], claim.call):
                raise Conflict(f"the Idempotency-Key of {claim.call} lapsed, and stands for another call; call again")
            where = Last(KEYS_STREAM, subject, there[0] if there is not None else 0)
            with contextlib.suppress(Changed):  # the try before was stored, or somebody has claimed it just now
                await self._stored.write(subject, claim, keep_s=keep_s, where=where)
                return
        raise Unavailable("the Idempotency-Key cannot be held now; call again")

    # --- reading ----------------------------------------------------------------------------------
    async def find(self, call: str, *, led: bool = True) -> tuple[str, CallOrder]:
        """The stream that has it, and what was asked. ``led`` as ``Stored.last``. Raises ``CallNotFound``,
        ``JournalExpired`` where only its end is left."""
        for stream in STREAMS:
            found = await self._stored.last(stream, _place(stream, call, CallOrder), led=led)
            if found is not None:
                return stream, order_of(found[1])
        if await self._stored.last(JOURNAL_STREAM, _place(JOURNAL_STREAM, call, Ended), led=led) is not None:
            raise expired(call)
        raise CallNotFound(
            f"no call {call} is kept: it is unknown, ended long ago, or had neither `Prefer: respond-async` nor an"
            " Idempotency-Key"
        )

    async def require_nothing(self, call: str) -> None:
        """Raises ``JournalExpired`` where anything is left of a call that has no order. Not to be asked while an order
        may still come: an heir writes it last."""
        if await self._stored.last(JOURNAL_STREAM, call_entries(JOURNAL_STREAM, call)) is not None:
            raise expired(call)

    async def end_of(self, stream: str, call: str) -> Journaled:
        """Of a call alone how it has ended, if it has, and whether its answer is kept."""
        return await self._last(stream, call, Ended, Kept)

    async def outline(self, call: str) -> Journaled:
        """What was asked, what instance had it last, and how it has ended, if it has, and whether its answer is kept.
        Raises as ``find``."""
        stream, order = await self.find(call)
        found = await self._last(stream, call, Began, Ended, Kept)
        found.take(order)
        return found

    async def _last(self, stream: str, call: str, *kinds: type[Entry]) -> Journaled:
        found = Journaled()
        for kind in kinds:
            there = await self._stored.last(stream, _place(stream, call, kind))
            if there is not None:
                found.take(entry_of(there[1]))
        return found

    async def entries(self, stream: str, call: str) -> AsyncGenerator[Entry | None, None]:
        """Everything that is and will be written of a call, in order; None once all that was there has come. While
        nothing comes it is looked for every READING_S: raises ``JournalExpired`` once its order is gone."""
        looked = self._clock()

        async def idle() -> None:
            nonlocal looked
            if self._clock() - looked >= READING_S:
                looked = self._clock()
                await self.require(stream, call)

        async with aclosing(messages(self._bus, stream, call_entries(stream, call), None, idle=idle)) as found:
            async for message in found:
                yield None if message.data is None else entry_of(message.data)

    async def now(self, stream: str, call: str) -> tuple[Journaled, list[Entry]]:
        """What is written of a call now."""
        journaled, entries = Journaled(), []
        async with aclosing(self.entries(stream, call)) as found:
            async for entry in found:
                if entry is None:
                    break
                journaled.take(entry)
                entries.append(entry)
        return journaled, entries

    async def asked_to_cancel(self) -> set[str]:
        """Calls that somebody wanted ended while no gateway had them."""
        found: set[str] = set()
        for stream in STREAMS:
            found |= (await snapshot(self._bus, stream, call_entries(stream, "*", entry_name(CancelAsked)))).keys()
        return {subject.split(".")[2] for subject in found}

    async def all(self) -> dict[str, Journaled]:
        """Every call that is known, without bodies and answers, by id. What another release wrote is left out."""
        calls: dict[str, Journaled] = {}
        for stream in STREAMS:
            for kind in (CallOrder, Began, Ended, Kept):
                found = await snapshot(self._bus, stream, call_entries(stream, "*", entry_name(kind)))
                for number, (subject, data) in enumerate(found.items()):
                    if number % TOGETHER == 0:
                        await asyncio.sleep(0)  # there may be very many, and others' streams wait meanwhile
                    try:
                        calls.setdefault(subject.split(".")[2], Journaled()).take(entry_of(data))
                    except ProtocolError as error:
                        log.error("%s is left out: %s", subject, error.message)
        return {call: journaled for call, journaled in calls.items() if journaled.order is not None}


def _place(stream: str, call: str, kind: type[Entry], number: int | None = None) -> str:
    return call_entry(stream, call, entry_name(kind, number))


def entry_of(data: bytes) -> Entry:
    """One entry. Raises ``ProtocolError``, also for a schema of another release."""
    return codec.served(cast(Entry, codec.unpack(cast(Any, Entry), data)), "an entry of a call's journal")


def order_of(data: bytes) -> CallOrder:
    """What was asked. Raises as ``entry_of``."""
    return codec.served(codec.unpack(CallOrder, data), "what a kept call was asked for")


def _claim_of(data: bytes) -> KeyClaim:
    return codec.served(codec.unpack(KeyClaim, data), "the claim of an Idempotency-Key")


def _stands(there: tuple[int, bytes] | None, mine: KeyClaim) -> KeyClaim | None:
    """Whose key it is by what is written of it; None: its time has ended, or it is nobody's. Raises ``InvalidArgument``
    where that call was asked for something else than ``mine``."""
    if there is None or (found := _claim_of(there[1])).refused:
        return None
    if found.body != mine.body:
        raise InvalidArgument("this Idempotency-Key was used for another request; use a new key", field=KEY)
    return found


def _is_of(data: bytes, call: str) -> bool:
    """Whether it is the claim of ``call``. What another release wrote is not: that one has the key by now."""
    try:
        return _claim_of(data).call == call
    except ProtocolError:
        return False


def moved(call: str, why: str = SILENT) -> CallMoved:
    """What a gateway says that has lost a call to another, or leaves it to one."""
    return CallMoved(
        f"another gateway goes on with {call}, since {why}; read on there by GET /v1/calls/{call}/events with"
        " Last-Event-ID"
    )


def expired(call: str) -> JournalExpired:
    """What is said of a call whose order the journal has let go of."""
    return JournalExpired(
        f"what was kept of {call} is gone: the journal was full, or its servers were restarted; what it did stands."
        " Call again, with another Idempotency-Key"
    )


def kept_s(timeout_s: float) -> float:
    """How long entries of a call that may run for ``timeout_s`` more are kept, whenever it ends."""
    return timeout_s + JOURNAL_TTL_S + CLAIMED_S


def known_s(timeout_s: float) -> float:
    """How long it is known."""
    return kept_s(timeout_s) + KNOWN_S
