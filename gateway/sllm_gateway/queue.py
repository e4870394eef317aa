"""Who gets which slot: the waiting calls of one version and the instances that take them. Pure; time is handed in.

The instance is the judge of its slots. What is counted here is a belief, corrected by ``busy`` and ``gone``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import merge
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from sllm_runtime.protocol.records import RouteEntry

T = TypeVar("T", bound=Hashable)

NONE: Final[Mapping[str, int]] = MappingProxyType({})
BUSY_FIRST_S, BUSY_MOST_S = 0.02, 0.5
GONE_FIRST_S, GONE_MOST_S = 0.25, 5.0


@dataclass(frozen=True)
class Hold:
    """An instance that is not asked again before ``until``; the next hold lasts twice as long."""

    until: float
    lasted: float
    gone: bool


class Waiting(Generic[T]):
    """Calls in the order of their turns, those of each numerics class (empty: of none) in a line of their own: what one
    of a class waits for all behind it wait for as well, and nobody goes through them."""

    def __init__(self) -> None:
        self._lines: dict[str, OrderedDict[T, int]] = {}
        """By class: each call with its turn."""
        self._class: dict[T, str] = {}
        self._first = self._last = 0

    def __len__(self) -> int:
        return len(self._class)

    def __contains__(self, call: T) -> bool:
        return call in self._class

    def __iter__(self) -> Iterator[T]:
        """In order."""
        return (call for call, _ in merge(*(line.items() for line in self._lines.values()), key=_turn))

    def push(self, call: T, numerics: str) -> None:
        """Its turn is the last one."""
        self._last += 1
        self._add(call, numerics, self._last)

    def push_front(self, call: T, numerics: str) -> None:
        """Its turn is the next one."""
        self._first -= 1
        self._add(call, numerics, self._first)
        self._lines[numerics].move_to_end(call, last=False)

    def _add(self, call: T, numerics: str, turn: int) -> None:
        self._lines.setdefault(numerics, OrderedDict())[call] = turn
        self._class[call] = numerics

    def remove(self, call: T) -> bool:
        """Whether ``call`` waited; it no longer does."""
        numerics = self._class.pop(call, None)
        if numerics is None:
            return False
        line = self._lines[numerics]
        del line[call]
        if not line:
            del self._lines[numerics]
        return True

    def bind(self, call: T, numerics: str) -> None:
        """It waits for this class from now on; its turn stays."""
        turn = self._lines[self._class[call]][call]
        self.remove(call)
        self._add(call, numerics, turn)
        self._lines[numerics] = OrderedDict(sorted(self._lines[numerics].items(), key=_turn))

    def next(self, but: Collection[str]) -> tuple[T, str] | None:
        """Whose turn it is, of all classes ``but`` these, and its class."""
        heads = ((next(iter(line.items())), numerics) for numerics, line in self._lines.items() if numerics not in but)
        found = min(heads, key=lambda head: _turn(head[0]), default=None)
        return (found[0][0], found[1]) if found is not None else None


def _turn(item: tuple[T, int]) -> int:
    return item[1]


class SlotQueue(Generic[T]):
    """First come, first served; a call that was sent back goes to the head. ``bound``: the numerics class
    (``fingerprint``) at which a call has to go on, if any; one that has none may get one while it waits."""

    def __init__(self, bound: Callable[[T], str] = lambda _: "") -> None:
        self.entries: dict[str, RouteEntry] = {}
        self.running: dict[str, int] = {}
        """Calls of this gateway on each instance, also on one that has left the route and still drains."""
        self.waiting: Waiting[T] = Waiting()
        self.came: dict[str, float] = {}
        """Since when each instance is in the route."""
        self._bound = bound
        self._holds: dict[str, Hold] = {}
        self._open: set[str] = set()
        """Those with a slot that is free as far as is known: while there are none nobody is looked at."""
        self._alive: Counter[str] = Counter()
        """How many of each numerics class will take a waiting call sooner or later."""

    def on_route(self, entries: Iterable[RouteEntry], now: float) -> None:
        """The route now has these instances, and only these."""
        self.entries = {entry.instance: entry for entry in entries}
        self.came = {name: self.came.get(name, now) for name in self.entries}
        self._holds = {name: hold for name, hold in self._holds.items() if name in self.entries}
        self._open = {name for name, entry in self.entries.items() if self._has_slot(entry)}
        self._alive = Counter(entry.fingerprint for entry in self.entries.values() if self._living(entry))

    def push(self, call: T) -> None:
        self.waiting.push(call, self._bound(call))

    def push_front(self, call: T) -> None:
        """For a call that had its turn and was sent back."""
        self.waiting.push_front(call, self._bound(call))

    def remove(self, call: T) -> bool:
        """Whether ``call`` waited; it no longer does."""
        return self.waiting.remove(call)

    def match(self, now: float, reserved: Mapping[str, int] = NONE) -> list[tuple[T, RouteEntry]]:
        """Give free slots to waiting calls, the least loaded instance first. The slots count as taken. ``reserved``:
        those that calls from elsewhere are to have, by instance. A call that is bound to a class waits for an instance
        of it where such live, and others pass it by."""
        matched: list[tuple[T, RouteEntry]] = []
        taken: set[str] = set()
        """Classes that live and have no slot."""
        while (turn := self.waiting.next(but=taken)) is not None:
            call, numerics = turn
            if not numerics and (numerics := self._bound(call)):
                self.waiting.bind(call, numerics)
                continue
            lives = numerics != "" and self._alive[numerics] > 0
            entry = self._freest(now, reserved, numerics if lives else "")
            if entry is not None:
                self.waiting.remove(call)
                self._count(entry.instance, 1)
                matched.append((call, entry))
            elif lives:
                taken.add(numerics)
            else:
                break
        return matched

    def free(self, now: float, reserved: Mapping[str, int] = NONE) -> bool:
        """Whether an instance has a slot for one more call. ``reserved`` as for ``match``."""
        return self._freest(now, reserved) is not None

    def _freest(self, now: float, reserved: Mapping[str, int], numerics: str = "") -> RouteEntry | None:
        best, most = None, 0
        for entry in self.entries.values() if self._open else ():
            if entry.moves_to or (numerics and entry.fingerprint != numerics):
                continue
            free = self._free(entry) - reserved.get(entry.instance, 0)
            if free > most and not self._held(entry.instance, now):
                best, most = entry, free
        return best

    def _free(self, entry: RouteEntry) -> int:
        return entry.concurrency - self.running.get(entry.instance, 0)

    def _has_slot(self, entry: RouteEntry) -> bool:
        return not entry.moves_to and self._free(entry) > 0

    def _count(self, instance: str, more: int) -> None:
        """So many ``more`` calls run on it."""
        running = self.running.get(instance, 0) + more
        if running > 0:
            self.running[instance] = running
        else:
            self.running.pop(instance, None)
        entry = self.entries.get(instance)
        if entry is not None and self._has_slot(entry):
            self._open.add(instance)
        else:
            self._open.discard(instance)

    def _held(self, instance: str, now: float) -> bool:
        hold = self._holds.get(instance)
        return hold is not None and now < hold.until

    def may_ask(self, instance: str, now: float) -> bool:
        """Whether a call that moves may ask it for a slot."""
        entry = self.entries.get(instance)
        return entry is not None and self._free(entry) > 0 and not self._held(instance, now)

    def take(self, instance: str) -> None:
        """A call that moves takes one of its slots, with no turn."""
        self._count(instance, 1)

    def accepted(self, instance: str) -> None:
        """It took a call: its next ``busy`` holds for the shortest time again."""
        self._set_hold(instance, None)

    def busy(self, instance: str, now: float) -> None:
        """It refused a call: all its slots are taken, by whomever."""
        self.release(instance, freed=False)
        self._hold(instance, now, BUSY_FIRST_S, BUSY_MOST_S, gone=False)

    def gone(self, instance: str, now: float) -> None:
        """It did not answer, or said that it is no more. The route will tell; until then it is left alone."""
        self.release(instance, freed=False)
        self._hold(instance, now, GONE_FIRST_S, GONE_MOST_S, gone=True)

    def _hold(self, instance: str, now: float, first: float, most: float, *, gone: bool) -> None:
        if instance in self.entries:
            before = self._holds.get(instance)
            lasts = first if before is None or before.gone != gone else min(most, before.lasted * 2)
            self._set_hold(instance, Hold(now + lasts, lasts, gone))

    def _set_hold(self, instance: str, hold: Hold | None) -> None:
        """Only those of the route are held."""
        entry = self.entries.get(instance)
        if entry is None:
            return
        lived = self._living(entry)
        if hold is not None:
            self._holds[instance] = hold
        else:
            self._holds.pop(instance, None)
        self._alive[entry.fingerprint] += self._living(entry) - lived

    def release(self, instance: str, *, freed: bool = True) -> None:
        """A call of ours on it is over. ``freed``: its slot is known to be free now."""
        self._count(instance, -1)
        if freed:
            self.has_room(instance)

    def has_room(self, instance: str) -> bool:
        """It is known to have a free slot: ask it again at once. Whether it was held as busy."""
        hold = self._holds.get(instance)
        if hold is None or hold.gone:
            return False
        self._set_hold(instance, None)
        return True

    @property
    def gone_instances(self) -> tuple[str, ...]:
        """Instances to report to the controller."""
        return tuple(sorted(name for name, hold in self._holds.items() if hold.gone))

    @property
    def living(self) -> int:
        """Instances that will take a waiting call sooner or later."""
        return self._alive.total()

    def _living(self, entry: RouteEntry) -> bool:
        hold = self._holds.get(entry.instance)
        return not entry.moves_to and (hold is None or not hold.gone)

    def next_try(self, now: float) -> float | None:
        """When a held instance may be asked again, if anybody waits for it."""
        if not self.waiting:
            return None
        return min((hold.until for hold in self._holds.values() if hold.until > now), default=None)
