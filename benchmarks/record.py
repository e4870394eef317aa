"""The record of a benchmark's run (see benchmarks/README.md), and the sums made over its samples."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

VERSION: Final = 1
TAIL: Final = 100
"""Samples of which the 99th percentile is not the worst one."""


@dataclass
class Case:
    """What one system did in one case. ``samples`` in ``unit``; a peer that could not run has none and a reason."""

    case: str
    system: str
    unit: str
    samples: list[float] = field(default_factory=list)
    cpu_s: float | None = None
    peak_rss_mib: float | None = None
    notes: str = ""
    not_run: str = ""
    """Why this system is not in the run."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further figures of the case: stages, percentiles."""

    @property
    def median(self) -> float | None:
        return statistics.median(self.samples) if self.samples else None

    def take(self, sample: float, cpu_s: float | None = None, mib: float | None = None) -> None:
        """A sample, and what it cost: of CPU seconds the mean over the samples stands beside them, of memory the most.
        None: not known."""
        if cpu_s is not None:
            self.cpu_s = round(mean_with(self.cpu_s, len(self.samples), cpu_s), 4)
        if mib is not None:
            self.peak_rss_mib = round(max(self.peak_rss_mib or 0.0, mib), 1)
        self.samples.append(sample)

    def document(self) -> dict[str, Any]:
        """As it stands in the record."""
        made = asdict(self)
        spread = {"median": self.median, "min": min(self.samples, default=None), "max": max(self.samples, default=None)}
        return {key: value for key, value in (made | spread).items() if value not in (None, "", {}, [])}


@dataclass(frozen=True)
class Aim:
    """A claim as a figure of this run. ``value`` None: its sample is missing or too small to judge."""

    aim: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it was met; None where it cannot be judged."""
        if self.value is None:
            return None
        return (self.at_least is None or self.value >= self.at_least) and (
            self.at_most is None or self.value <= self.at_most
        )

    @property
    def bound(self) -> str:
        """In words."""
        sides = (("≥", self.at_least), ("≤", self.at_most))
        return ", ".join(f"{sign} {value}" for sign, value in sides if value is not None)

    def document(self) -> dict[str, Any]:
        """As it stands in the record."""
        bounds = {key: value for key in ("at_least", "at_most") if (value := getattr(self, key)) is not None}
        return {"aim": self.aim, **bounds, "value": self.value, "met": self.met}


@dataclass
class Record:
    """One run."""

    benchmark: str
    commit: str
    started: str
    seconds: float
    machine: dict[str, Any]
    settings: dict[str, Any]
    cases: list[Case]
    aims: list[Aim]

    def document(self) -> dict[str, Any]:
        """The JSON record."""
        return {
            "benchmark": self.benchmark,
            "version": VERSION,
            "commit": self.commit,
            "started": self.started,
            "seconds": round(self.seconds, 1),
            "machine": self.machine,
            "settings": self.settings,
            "cases": [case.document() for case in self.cases],
            "aims": [aim.document() for aim in self.aims],
        }

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.document(), indent=1) + "\n")


def mean_with(mean: float | None, count: int, value: float) -> float:
    """The mean of ``count`` values and one more."""
    return ((mean or 0.0) * count + value) / (count + 1)


BEATEN: Final = 1.1
"""A limit that is beaten by more than that is none: the reference is wrong, and what is held against it missed."""


def against_limit(name: str, limits: Sequence[Case], mine: Case, *, at_least: float, least: int) -> Aim:
    """Ours beside the fastest of the limits that were measured (times)."""
    fastest = min((each for each in limits if each.samples), key=lambda each: each.median or 0.0, default=None)
    aim = f"{name}: {fastest.system if fastest else 'limit'} / {mine.system}"
    return Aim(aim, ratio(fastest, mine, least=least), at_least=at_least, at_most=BEATEN)


def ratio(over: Case | None, under: Case | None, *, least: int) -> float | None:
    """Ratio of medians within one run; None if either has fewer than ``least`` samples."""
    if over is None or under is None or min(len(over.samples), len(under.samples)) < least:
        return None
    top, bottom = over.median, under.median
    return top / bottom if top is not None and bottom else None


def none_of(aim: str, count: float, *, of: int, least: int) -> Aim:
    """That nothing of a kind happened ``of`` so many times. What did is a miss, however few those were; that nothing
    did says something from ``least`` on."""
    return Aim(aim, float(count) if count or of >= least else None, at_most=0.0)


def tail(samples: Sequence[float], unit: str = "") -> dict[str, float]:
    """The p99 by its name; of fewer than a hundred it is the maximum, and is called so."""
    if not samples:
        return {}
    return {f"p99{unit}": percentile(samples, 99)} if len(samples) >= TAIL else {f"max{unit}": max(samples)}


def percentile(samples: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile (nearest rank). Raises ``ValueError`` without samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100).__int__() - 1))]
