"""Which gateway a free slot is for, where calls of several wait for slots of one version. Pure; time is handed in.

A gateway hears first of the end of its own calls, so it would have each slot again before any other one asks, for as
long as calls of its own wait. A slot that is kept for another one stays free until that has asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

TURN_S: Final = 0.5
"""Where none has more than who waits, who has the slots keeps them for so long: each change takes a moment."""
ASKS_S: Final = 1.0
"""A call that waits is asked for again within this."""
KEPT_S: Final = 0.1
"""A free slot is kept so long for who was refused before, and has yet to hear of it."""

Version = tuple[str, int]


@dataclass
class _Waits:
    """A gateway that was refused."""

    since: float
    asked: float
    calls: dict[str, float] = field(default_factory=dict)
    """When each call was last asked for."""

    def live(self, now: float) -> int:
        """How many of them wait still."""
        return sum(now - asked <= ASKS_S for asked in self.calls.values())


class Turns:
    """By version: the gateways that wait, and the slots that are kept for them."""

    def __init__(self) -> None:
        self._waits: dict[Version, dict[str, _Waits]] = {}
        self._kept: dict[Version, dict[str, tuple[str, float]]] = {}

    def refused(self, version: Version, gateway: str, call: str, now: float) -> None:
        """All slots are taken, or kept for others."""
        waits = self._waits.setdefault(version, {}).setdefault(gateway, _Waits(now, now))
        waits.asked = waits.calls[call] = now

    def taken(self, version: Version, instance: str, gateway: str, call: str, now: float) -> None:
        """``call`` has a slot."""
        waits = self._waits.get(version, {}).get(gateway)
        if waits is not None:
            waits.since = now
            waits.calls.pop(call, None)
        if version in self._kept:
            self._kept[version].pop(instance, None)

    def yields(self, version: Version, instance: str, gateway: str, running: Callable[[str], int], now: float) -> bool:
        """Whether a free slot of ``instance`` is kept for another one. ``running``: calls of this version that run here
        for a gateway."""
        known = self._waits.get(version)
        if not known or known.keys() == {gateway}:
            return False
        kept = self._kept.setdefault(version, {})
        own = running(gateway) + self._promised(version, instance, gateway, now)
        since = known[gateway].since if gateway in known else now
        for other, waits in known.items():
            if other == gateway:
                continue
            promised = self._promised(version, instance, other, now)
            theirs = running(other) + promised
            turn = theirs < own or (theirs == own and waits.since < since and now - waits.since >= TURN_S)
            if not turn or waits.live(now) <= promised:
                continue
            whose, at = kept.get(instance, ("", 0.0))
            if waits.asked > at if whose and now - at > KEPT_S else whose != other:
                kept[instance] = (other, now)
                return True
            if now - at <= KEPT_S:
                return True
        return False

    def _promised(self, version: Version, instance: str, gateway: str, now: float) -> int:
        """Slots of other instances that are kept for it."""
        kept = self._kept.get(version, {}).items()
        return sum(name != instance and whose == gateway and now - at <= KEPT_S for name, (whose, at) in kept)

    def outdate(self, now: float) -> None:
        """Whoever asks no more is forgotten."""
        for version, known in list(self._waits.items()):
            for gateway, waits in list(known.items()):
                waits.calls = {call: asked for call, asked in waits.calls.items() if now - asked <= ASKS_S}
                if not waits.calls:
                    del known[gateway]
            kept = self._kept.get(version, {}) if known else {}
            self._kept[version] = {name: slot for name, slot in kept.items() if now - slot[1] <= ASKS_S}
            if not known:
                del self._waits[version], self._kept[version]
