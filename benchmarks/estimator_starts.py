"""Starts as ``benchmarks.estimator`` measures them: one, what was expected of it and what it took; and the sums."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import cold_gigabyte, page_cache, synthetic
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, percentile
from benchmarks.runner import Run
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.timeline import IMPORT, SANDBOX, SETUP, START_STAGES, WEIGHTS, Span

MIB: Final = 2**20
SEEN_S: Final = 60.0
_LOOK_S: Final = 0.05
PARTITION: Final = "partition_0.bin"
DRAM: Final = (5.0, 0.03)
SSD: Final = (15.0, 0.04)
"""Milliseconds and share of the start that 95 of 100 errors may have, whichever is more."""
LEAST: Final = 200
"""Starts below which nothing is judged."""
AS_GOOD: Final = 0.8
"""Of the constant's p95: with more than that, it says so."""
LOADING: Final = "q + n/b"
REST: Final = "rest"


@dataclass(frozen=True)
class Start:
    """One start, in ms. ``tier``: where the weights were expected to come from."""

    function: str
    tier: str
    expected: float
    took: float
    stages: Mapping[str, float] = field(default_factory=dict)
    """What its stages took, and ``rest``: what lies around them."""
    terms: Mapping[str, float] = field(default_factory=dict)
    """What was expected, by the names of the events."""

    @property
    def error(self) -> float:
        return abs(self.expected - self.took)

    @property
    def size(self) -> str:
        """Equal starts are those of models of one size."""
        return self.function.partition("-")[0]

    @property
    def by_term(self) -> dict[str, tuple[float, float]]:
        """What was expected of each term, and what it took. q + n/b by the span of the weights, but for those that were
        expected in memory, of which nothing is read; the rest is all that lies around the others."""
        if not self.terms or not self.stages:
            return {}
        guess = self.terms
        found = {name: (guess[name], self.stages.get(name, guess[name])) for name in (SANDBOX, IMPORT, SETUP)}
        loading = taken = guess["queue"] + guess["read"]
        if self.tier not in ("dram", "none"):
            taken = self.stages.get(WEIGHTS, loading)
            found[LOADING] = (loading, taken)
        rest = [
            whole - max(found[SANDBOX][k] + found[IMPORT][k], weights) - found[SETUP][k] - guess["release"]
            for k, (whole, weights) in enumerate(((self.expected, loading), (self.took, taken)))
        ]
        return {**found, REST: (rest[0], rest[1])}


def deployed(platform: Platform, directory: Path, mib: int) -> str:
    """A function with a model of so many MiB; its name."""
    name = f"m{mib}"
    home = directory / name
    synthetic.write(home / "model", mib * MIB, cold_gigabyte.STEP, seed=mib)
    # One module of a name for an interpreter.
    file = shutil.copy(cold_gigabyte.FUNCTION, home / f"estimated{mib}.py")
    return platform.deploy(Path(file), name=name, memory=512 * MIB)


def begin(platform: Platform, name: str) -> Start:
    """Call it; what its start was expected to take, and took. Raises ``ProgramFailed``."""
    began = time.time()
    answer = platform.stream(name, {})
    until = time.monotonic() + SEEN_S
    while (found := _told(platform, name, began)) is None:
        if time.monotonic() > until:
            raise ProgramFailed(f"{name}: the controller did not tell what its start took")
        time.sleep(_LOOK_S)
    took = float(found["took_s"]) * 1e3
    terms = {
        name: float(value) * 1e3 for name, _, value in (each.partition("=") for each in found["terms_s"].split(","))
    }
    return Start(name, found["tier"], float(found["expected_s"]) * 1e3, took, _stages(answer.spans, took), terms)


def _told(platform: Platform, name: str, began: float) -> dict[str, str] | None:
    """What an instance that became ready since ``began`` was expected to take, and took."""
    found = None
    for event in platform.client.events("GET", f"{API}/events", params={"function": name, "limit": "50"}):
        if event.event == "event":
            said = json.loads(event.data)
            found = said["fields"] if said["kind"] == "instance.ready" and said["at"] >= began else found
    return found


def _stages(spans: Sequence[Span], took: float) -> dict[str, float]:
    own = [span for span in spans if span.name in START_STAGES]
    covered = max(span.at + span.ms for span in own) - min(span.at for span in own) if own else 0.0
    return {**{span.name: span.ms for span in own}, REST: took - covered}


def forget(platform: Platform, names: Sequence[str], *, dram: bool) -> None:
    """No instance; unless ``dram`` nothing of the models in memory either."""
    platform.until_cold(*names)
    if dram:
        return
    asyncio.run(cold_gigabyte.evict(platform))
    for folder, _, files in os.walk(platform.data):  # which passes over a sandbox's directory that goes meanwhile
        if PARTITION in files:
            page_cache.drop(Path(folder, PARTITION))
    until = time.monotonic() + SEEN_S
    while any("dram" in tiers for tiers in platform.client.request("GET", f"{API}/nodes/n1")["tiers"].values()):
        if time.monotonic() > until:
            raise ProgramFailed(f"the controller does not see after {SEEN_S:g} s that the models have left the memory")
        time.sleep(_LOOK_S)


# --- sums ---------------------------------------------------------------------------------------------
def tell(run: Run, case: str, starts: Sequence[Start], limit: tuple[float, float]) -> None:
    """The errors of a case's starts, and whether the aims are met. Raises ``ValueError`` without starts."""
    ours, constant = run.case(case, "sllm"), run.case(case, "constant")
    ours.samples += [round(start.error, 3) for start in starts]
    constant.samples += [round(abs(mean - start.took), 3) for mean, start in constants(starts)]
    spread = run.case(case, "spread")
    spread.samples += [round(far, 3) for far in spreads(starts, lambda start: start.took)]
    for stage in starts[0].stages:
        far = spreads(starts, partial(_stage, stage))
        spread.extra[f"{stage}_p95_ms"] = round(percentile(far, 95), 3)
    for each in (ours, constant, spread):
        if each.samples:
            each.extra["p95_ms"] = round(percentile(each.samples, 95), 3)
    for term in starts[0].by_term:
        off = [abs(taken - expected) for expected, taken in (each.by_term.get(term, (0.0, 0.0)) for each in starts)]
        ours.extra[f"{term}_off_p95_ms"] = round(percentile(off, 95), 3)
    worst = max(starts, key=lambda start: start.error)
    ours.extra["took_ms"] = round(statistics.median(start.took for start in starts), 1)
    ours.notes = (
        f"worst: {worst.function} from {worst.tier}, {worst.expected:.0f} ms expected, {worst.took:.0f} ms taken"
        f"{cause(worst)}"
    )
    least, share = limit
    excess = percentile([start.error / max(least, share * start.took) for start in starts], 95)
    enough = len(starts) >= LEAST
    aim = f"{case}: p95 of error / max({least:g} ms, {share:.0%} of the start)"
    run.aims.append(Aim(aim, round(excess, 3) if enough else None, at_most=1.0))
    beside(run, ours, constant, enough)


def beside(run: Run, ours: Case, constant: Case, enough: bool) -> None:
    """The constant predictor: whether ours is better, and, where it hardly is, in words."""
    known, theirs = ours.extra["p95_ms"], constant.extra.get("p95_ms", 0.0)
    ratio = round(known / max(theirs, 0.001), 3)
    run.aims.append(Aim(f"{ours.case}: p95 of error / the constant's", ratio if enough else None, at_most=1.0))
    if ratio > AS_GOOD:
        ours.notes += f"; a constant is as good here, or nearly: its p95 is {theirs:.1f} ms beside {known:.1f}"


def constants(starts: Sequence[Start]) -> Iterator[tuple[float, Start]]:
    """What a predictor that knows nothing but the past expects: the mean of the function's earlier starts. None of its
    first."""
    known: dict[str, list[float]] = {}
    for start in starts:
        earlier = known.setdefault(start.function, [])
        if earlier:
            yield statistics.fmean(earlier), start
        earlier.append(start.took)


def spreads(starts: Sequence[Start], of: Callable[[Start], float]) -> list[float]:
    """How far each is from the median of its equals."""
    alike: dict[str, list[float]] = {}
    for start in starts:
        alike.setdefault(start.size, []).append(of(start))
    middle = {size: statistics.median(values) for size, values in alike.items()}
    return [abs(of(start) - middle[start.size]) for start in starts]


def _stage(name: str, start: Start) -> float:
    return start.stages.get(name, 0.0)


def cause(worst: Start) -> str:
    """The term of what was expected of ``worst`` that was furthest from what it took, in words."""
    terms = worst.by_term
    if not terms:
        return ""
    name = max(terms, key=lambda each: abs(terms[each][1] - terms[each][0]))
    expected, taken = terms[name]
    parts = f" ({worst.terms['queue']:.0f} + {worst.terms['read']:.0f})" if name == LOADING else ""
    return f"; furthest off was {name}: {expected:.0f} ms expected{parts}, {taken:.0f} taken"
