"""Which fault comes when, in ``benchmarks.chaos``: a pure function of a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")
COMPONENTS: Final = ("worker", "invoker", "loaderd", "controller", "gateway", "nats")
SIGNALS: Final = ("killed", "stopped")
STOPPED_S: Final = (2.0, 8.0)
GAP_S: Final = (0.0, 1.0)


@dataclass(frozen=True, order=True)
class Kind:
    """A component and what befalls it: ``killed`` (SIGKILL) or ``stopped`` (SIGSTOP, later SIGCONT)."""

    component: str
    signal: str

    def __str__(self) -> str:
        return f"{self.component} {self.signal}"


KINDS: Final = tuple(Kind(component, signal) for component in COMPONENTS for signal in SIGNALS)


@dataclass(frozen=True)
class Fault:
    """``pick``: which of the processes it may befall, as a share of their number; ``stopped_s``: how long one stands
    still (0: it is killed); ``gap_s``: how long nothing befalls anybody before."""

    kind: Kind
    pick: float
    stopped_s: float
    gap_s: float

    def of(self, those: list[T]) -> T:
        """The one of ``those``, which are at least one."""
        return those[int(self.pick * len(those))]


def schedule(seed: int, longest_s: float = STOPPED_S[1]) -> Iterator[Fault]:
    """Faults without end: every kind once, in an order of its own, then every kind again. None stops anything for
    longer than ``longest_s``."""
    chance = random.Random(seed)
    while True:
        for kind in chance.sample(KINDS, len(KINDS)):
            stopped = chance.uniform(STOPPED_S[0], longest_s) if kind.signal == "stopped" else 0.0
            yield Fault(kind, chance.random(), stopped, chance.uniform(*GAP_S))
