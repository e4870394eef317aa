"""The record of a benchmark's run (see benchmarks/README.md), and the sums made over its samples."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

VERSION: Final = 1


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


def ratio(over: Case | None, under: Case | None, *, least: int) -> float | None:
    """Ratio of medians within one run; None if either has fewer than ``least`` samples."""
    if over is None or under is None or min(len(over.samples), len(under.samples)) < least:
        return None
    top, bottom = over.median, under.median
    return top / bottom if top is not None and bottom else None


def percentile(samples: list[float], percent: float) -> float:
    """The ``percent``-th percentile (nearest rank). Raises ``ValueError`` without samples."""
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * percent // 100).__int__() - 1))]
