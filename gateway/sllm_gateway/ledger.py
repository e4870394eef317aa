"""What is to be written of this gateway's streams, so that another one can go on with them. No I/O.

Nothing is done per token: what is new is found when something is about to be written, from the ids that a call keeps
anyway for its next instance. Ids that were not written are drawn again, and are the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain

from msgspec.structs import replace

from sllm_gateway.call import Call
from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol.calls import CallOrder
from sllm_runtime.protocol.frames import Ids
from sllm_runtime.protocol.limits import BATCH_BYTES
from sllm_runtime.protocol.lives import MOST_LOGGED, WHOLE_S, Gone, Log, LogEntry, More, Whole
from sllm_runtime.protocol.states import CallState

_ENTRY_BYTES = 1024
_ID_BYTES = 5
_GONE_BYTES = 48


@dataclass(frozen=True)
class _Where:
    """Which instance has it, or is asked to take it: whoever goes on with it is of its class from then on, as if it had
    taken it."""

    epoch: int
    numerics: str
    exact: bool


@dataclass(eq=False)
class _Line:
    call: Call
    asked: CallOrder
    whole: float | None = None
    """When all of it was last written; None: it never was, or is to be at once."""
    resumption: Resumption | None = None
    counts: dict[int, int] = field(default_factory=dict)
    where: _Where | None = None
    drawing: int = 0
    """So often what it had was thrown away."""


class Ledger:
    """The open streams of this gateway that could go on elsewhere."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}
        self._begun: dict[str, _Line] = {}
        """Those that have begun, or were given an instance, and that is not written yet."""
        self._gone: list[str] = []
        self.news = asyncio.Event()
        """Set when a stream has begun, was given an instance or has ended, and that is not written."""
        self._handed_on = False

    def __len__(self) -> int:
        return len(self._lines)

    def begin(self, call: Call, asked: CallOrder) -> None:
        """It has been admitted. One that cannot go on elsewhere, or whose request is large, is left out."""
        if call.resumption is not None and len(call.order.body) <= MOST_LOGGED:
            self._lines[call.id] = self._begun[call.id] = _Line(call, asked)
            self.news.set()

    def placed(self, call: Call) -> None:
        """An instance is asked to take it: from its first byte on the answer is of that one's class."""
        line = self._lines.get(call.id)
        if line is not None and line.call is call:
            self._begun[call.id] = line
            self.news.set()

    def end(self, call: str) -> None:
        """It is over. One that was handed on ends elsewhere."""
        if self._handed_on:
            return
        line = self._lines.pop(call, None)
        self._begun.pop(call, None)
        if line is not None and line.whole is not None:
            self._gone.append(call)
            self.news.set()  # should its gateway die, an heir that does not know would have all of it made again

    def hand_on(self) -> set[Call]:
        """Those whose callers have not all of the answer: they stay open, for another gateway to go on with. All others
        have ended. From then on none begins."""
        for call in [line.call for line in self._lines.values() if not _wanted(line.call)]:
            self.end(call.id)
        self._handed_on = True
        return {line.call for line in self._lines.values()}

    def written(self) -> list[tuple[Call, Whole]]:
        """Those of which anything may have been written, so that another gateway may know of them, with all of it; not
        those whose callers have all of the answer."""
        lines = [line for line in self._lines.values() if line.whole is not None and _wanted(line.call)]
        return [(line.call, _whole(line)) for line in lines]

    def anew(self) -> None:
        """Nothing that was written counts any more."""
        self._gone.clear()
        for line in self._lines.values():
            line.whole = None
        self._begun = dict(self._lines)
        if self._lines:
            self.news.set()

    def logs(self, now: float, *, begun: bool = False) -> list[Log]:
        """What is new, in messages that are not too large. It counts as written from now on. ``begun``: only what has
        begun or ended since; no other stream is looked at."""
        self.news.clear()
        lines = list((self._begun if begun else self._lines).values())
        self._begun.clear()
        gone, self._gone = self._gone, []
        found: list[Log] = []
        entries: list[LogEntry] = []
        size = 0
        ended: Iterator[LogEntry] = (Gone(call) for call in gone)
        for entry in chain(ended, (_entry(line, now) for line in lines)):
            if entry is None:
                continue
            nbytes = _size(entry)
            if entries and size + nbytes > BATCH_BYTES:
                found.append(Log(tuple(entries)))
                entries, size = [], 0
            entries.append(entry)
            size += nbytes
        return [*found, Log(tuple(entries))] if entries else found


def _wanted(call: Call) -> bool:
    """Whether its caller waits for more of it, or has yet to take what is here."""
    return not call.over or (call.state is CallState.SUCCEEDED and call.writing is not None)


def _entry(line: _Line, now: float) -> Whole | More | None:
    """What is new of it."""
    call, known = line.call, line.call.resumption
    assert known is not None
    if line.whole is None or now - line.whole > WHOLE_S or line.resumption is not known:
        line.drawing += line.resumption not in (None, known)
        line.whole, line.resumption, line.counts, line.where = now, known, known.counts, _where(call)
        return _whole(line)
    counts, where = known.counts, _where(call)
    if counts == line.counts and where == line.where:
        return None
    before = line.counts
    ids = [
        Ids(generation, before.get(generation, 0), tuple(known.known(generation)[before.get(generation, 0) :]))
        for generation, count in counts.items()
        if count > before.get(generation, 0)
    ]
    line.counts, line.where = counts, where
    return More(
        call=call.id,
        epoch=where.epoch,
        numerics=where.numerics,
        exact=where.exact,
        ids=tuple(ids),
        delivered=known.delivered,
        delivered_hash=known.digest,
        drawing=line.drawing,
    )


def _where(call: Call) -> _Where:
    numerics, exact = call.numerics, call.exact
    if call.binding is not None:
        numerics, exact = numerics or call.binding.entry.fingerprint, exact and call.binding.entry.exact
    return _Where(call.epoch, numerics, exact)


def _whole(line: _Line) -> Whole:
    call, known = line.call, line.call.resumption
    order, where = line.asked, _where(call)
    if known is not None:
        order = replace(order, delivered=known.delivered, delivered_hash=known.digest)
    return Whole(
        order=order,
        body=call.order.body,
        epoch=where.epoch,
        numerics=where.numerics,
        exact=where.exact,
        ids=known.recorded if known is not None else (),
        drawing=line.drawing,
    )


def _size(entry: LogEntry) -> int:
    if isinstance(entry, Gone):
        return _GONE_BYTES
    ids = sum(map(len, entry.ids)) if isinstance(entry, Whole) else sum(len(each.ids) for each in entry.ids)
    return _ENTRY_BYTES + ids * _ID_BYTES + (len(entry.body) if isinstance(entry, Whole) else 0)


def streams(logs: Iterable[Log]) -> list[Whole]:
    """What a life's log says of the streams that had not ended, from its beginning or any later place. It may have
    holes: what its gateway told as NATS went away, and had not stored before it died."""
    found: dict[str, Whole] = {}
    ids: dict[str, dict[int, list[int]]] = {}
    for entry in (entry for log in logs for entry in log.entries):
        if isinstance(entry, Whole):
            found[entry.order.call] = entry
            ids[entry.order.call] = {number: list(known) for number, known in enumerate(entry.ids)}
        elif isinstance(entry, Gone):
            found.pop(entry.call, None)
        elif entry.call in found:  # else its beginning has aged, and it is written whole further on
            before = found[entry.call]
            if entry.drawing != before.drawing:  # the message that said so was lost
                ids[entry.call] = {}
            order = replace(before.order, delivered=entry.delivered, delivered_hash=entry.delivered_hash)
            found[entry.call] = replace(
                before,
                order=order,
                epoch=entry.epoch,
                numerics=entry.numerics,
                exact=entry.exact,
                drawing=entry.drawing,
            )
            for new in entry.ids:
                known = ids[entry.call].setdefault(new.generation, [])
                if new.first <= len(known):  # else a message between was lost, and what it had is drawn again
                    known[new.first :] = new.ids
    return [replace(whole, ids=_by_generation(ids[call])) for call, whole in found.items()]


def _by_generation(ids: dict[int, list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids.get(number, ())) for number in range(max(ids, default=-1) + 1))
