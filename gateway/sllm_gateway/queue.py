"""Who gets which slot: the waiting calls of one version and the instances that take them. Pure; time is handed in.

The instance is the judge of its slots. What is counted here is a belief, corrected by ``busy`` and ``gone``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, TypeVar

from sllm_runtime.protocol.records import RouteEntry

T = TypeVar("T")

NONE: Final[Mapping[str, int]] = MappingProxyType({})
BUSY_FIRST_S, BUSY_MOST_S = 0.02, 0.5
GONE_FIRST_S, GONE_MOST_S = 0.25, 5.0


@dataclass(frozen=True)
class Hold:
    """An instance that is not asked again before ``until``; the next hold lasts twice as long."""

    until: float
    lasted: float
    gone: bool


class SlotQueue(Generic[T]):
    """First come, first served; a call that was sent back goes to the head."""

    def __init__(self) -> None:
        self.entries: dict[str, RouteEntry] = {}
        self.running: dict[str, int] = {}
        """Calls of this gateway on each instance, also on one that has left the route and still drains."""
        self.waiting: deque[T] = deque()
        self.came: dict[str, float] = {}
        """Since when each instance is in the route."""
        self._holds: dict[str, Hold] = {}

    def on_route(self, entries: Iterable[RouteEntry], now: float) -> None:
        """The route now has these instances, and only these."""
        self.entries = {entry.instance: entry for entry in entries}
        self.came = {name: self.came.get(name, now) for name in self.entries}
        self._holds = {name: hold for name, hold in self._holds.items() if name in self.entries}

    def push(self, call: T) -> None:
        self.waiting.append(call)

    def push_front(self, call: T) -> None:
        """For a call that had its turn and was sent back."""
        self.waiting.appendleft(call)

    def remove(self, call: T) -> bool:
        """Whether ``call`` waited; it no longer does."""
        try:
            self.waiting.remove(call)
        except ValueError:
            return False
        return True

    def match(
        self, now: float, reserved: Mapping[str, int] = NONE, bound: Callable[[T], str] = lambda _: ""
    ) -> list[tuple[T, RouteEntry]]:
        """Give free slots to waiting calls, the least loaded instance first. The slots count as taken. ``reserved``:
        those that calls from elsewhere are to have, by instance. ``bound``: the numerics class (``fingerprint``) at
        which a call has to go on, if any: where instances of it live it waits for one, and others pass it by."""
        matched: list[tuple[T, RouteEntry]] = []
        passed: list[T] = []
        while self.waiting:
            numerics = bound(self.waiting[0])
            numerics = numerics if numerics and self._lives(numerics) else ""
            entry = self._freest(now, reserved, numerics)
            if entry is not None:
                self.running[entry.instance] = self.running.get(entry.instance, 0) + 1
                matched.append((self.waiting.popleft(), entry))
            elif numerics:
                passed.append(self.waiting.popleft())
            else:
                break
        self.waiting.extendleft(reversed(passed))
        return matched

    def free(self, now: float, reserved: Mapping[str, int] = NONE) -> bool:
        """Whether an instance has a slot for one more call. ``reserved`` as for ``match``."""
        return self._freest(now, reserved) is not None

    def _freest(self, now: float, reserved: Mapping[str, int], numerics: str = "") -> RouteEntry | None:
        best, most = None, 0
        for entry in self.entries.values():
            if entry.moves_to or (numerics and entry.fingerprint != numerics):
                continue
            free = self._free(entry) - reserved.get(entry.instance, 0)
            if free > most and not self._held(entry.instance, now):
                best, most = entry, free
        return best

    def _free(self, entry: RouteEntry) -> int:
        return entry.concurrency - self.running.get(entry.instance, 0)

    def _held(self, instance: str, now: float) -> bool:
        hold = self._holds.get(instance)
        return hold is not None and now < hold.until

    def may_ask(self, instance: str, now: float) -> bool:
        """Whether a call that moves may ask it for a slot."""
        entry = self.entries.get(instance)
        return entry is not None and self._free(entry) > 0 and not self._held(instance, now)

    def take(self, instance: str) -> None:
        """A call that moves takes one of its slots, with no turn."""
        self.running[instance] = self.running.get(instance, 0) + 1

    def accepted(self, instance: str) -> None:
        """It took a call: its next ``busy`` holds for the shortest time again."""
        self._holds.pop(instance, None)

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
            self._holds[instance] = Hold(now + lasts, lasts, gone)

    def release(self, instance: str, *, freed: bool = True) -> None:
        """A call of ours on it is over. ``freed``: its slot is known to be free now."""
        left = self.running.get(instance, 0) - 1
        if left > 0:
            self.running[instance] = left
        else:
            self.running.pop(instance, None)
        if freed:
            self.has_room(instance)

    def has_room(self, instance: str) -> bool:
        """It is known to have a free slot: ask it again at once. Whether it was held as busy."""
        hold = self._holds.get(instance)
        if hold is None or hold.gone:
            return False
        del self._holds[instance]
        return True

    @property
    def gone_instances(self) -> tuple[str, ...]:
        """Instances to report to the controller."""
        return tuple(sorted(name for name, hold in self._holds.items() if hold.gone))

    @property
    def living(self) -> int:
        """Instances that will take a waiting call sooner or later."""
        return sum(map(self._living, self.entries.values()))

    def _living(self, entry: RouteEntry) -> bool:
        hold = self._holds.get(entry.instance)
        return not entry.moves_to and (hold is None or not hold.gone)

    def _lives(self, numerics: str) -> bool:
        return any(entry.fingerprint == numerics and self._living(entry) for entry in self.entries.values())

    def next_try(self, now: float) -> float | None:
        """When a held instance may be asked again, if anybody waits for it."""
        if not self.waiting:
            return None
        return min((hold.until for hold in self._holds.values() if hold.until > now), default=None)
