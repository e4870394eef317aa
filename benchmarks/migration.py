"""``python -m benchmarks.migration``: running calls move between two nodes, back and forth, while their callers read.

Four callers stream all the time, greedy and seeded, from one instance of the demo model that computes them in one
batch; no token is delayed. ``move``: ``POST /instances/{instance}/migrate`` again and again, each carrying over what
runs then; counted is each call that moved (the gateway's own count). ``restart``: the worker is killed instead, and its
calls are resumed on a new instance from their tokens (stop and restart). ``still``: as long with neither. ``beside``:
neither, but another function with the same model prefills and begins as many calls again and again, as a destination
does: how far instances that share this machine's cores slow each other. ``large``: as ``move``, a few times, with a
model of 0.5 G parameters (``migration_large``). ``figure3``: what a start that wants the place of a running call does
to both, by policy (``migration_policies``).

Every stream is compared, event by event, with the answer of the same call where nothing happened: lost and repeated by
the events' ids, different by their values. The pause of a call is the gap between two of its events in which it went
over, by the timeline that ends its stream (the longest within one interval of that moment), in mean intervals of the
same call. Beside it, as ``longest``, and for the other cases: the longest gap from the command until it is over; in it
the destination starts, prefills, and computes on the cores that the source has. ``jitter``, of the other cases: what
the rule of the pause finds at random moments, at none of which a call goes over.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import migration_large, migration_policies
from benchmarks.cold_cases import CODER
from benchmarks.heard import jitters, longest, pauses
from benchmarks.migration_load import CALLERS, Called, Load, move, moved, restart
from benchmarks.platform import Platform
from benchmarks.record import Aim, Case, percentile
from benchmarks.runner import Run, main

TOKENS: Final = 800
ASKS: Final = tuple(
    {"prompt": prompt, "max_tokens": TOKENS, "temperature": temperature, "seed": 7}
    for prompt in ("class Parser", "def ", "import os\n", "    return ")
    for temperature in (0.0, 0.8)
)
BESIDE: Final = tuple({**ask, "prompt": "def f(x):\n    return x\n" * 40, "max_tokens": 60} for ask in ASKS[:CALLERS])
STILL_S: Final = 1.0
SEED: Final = 1
SMALL: Final = ("still", "beside", "restart", "move")
LARGE: Final = "large"
FIGURE3: Final = "figure3"


@dataclass(frozen=True)
class Fate:
    """What befalls the calls again and again. ``enough``: whether so many times are. ``moves``: they go over by it."""

    act: Callable[[], object]
    enough: Callable[[int], bool]
    moves: bool = False


def measure(run: Run, cases: Sequence[str]) -> None:
    """The cases of the demo model on one platform of two nodes, one after the other."""
    with tempfile.TemporaryDirectory(prefix="bm-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if small := [case for case in cases if case in SMALL]:
            _small(run, directory / "p", small)
        if LARGE in cases:
            with run.attempt(LARGE, "intervals"):
                _large(run, directory / LARGE)
        if FIGURE3 in cases:
            with run.attempt(FIGURE3):
                migration_policies.measure(run, FIGURE3, directory / FIGURE3)


def _small(run: Run, directory: Path, cases: Sequence[str]) -> None:
    wanted = 100 if run.quick else 1000
    run.settings.update(callers=CALLERS, tokens=TOKENS, migrations=wanted)
    with Platform(directory, nodes=2) as platform:
        called = Called(platform, platform.deploy(CODER, keep_alive=600.0, concurrency=2 * CALLERS), ASKS)
        right = called.right()
        beside = called
        if "beside" in cases:
            name = platform.deploy(CODER, name="beside", keep_alive=600.0, concurrency=2 * CALLERS)
            beside = Called(platform, name, BESIDE)
        fates = {
            "still": Fate(lambda: time.sleep(STILL_S), lambda count: count >= 2 * run.rounds),
            "beside": Fate(beside.right, lambda count: count >= 2 * run.rounds),
            "restart": Fate(lambda: restart(called), lambda count: count >= run.rounds),
            "move": Fate(lambda: move(called), lambda _: moved(platform) >= wanted, moves=True),
        }
        for case in cases:
            with run.attempt(case, "intervals"):
                _case(run, called, case, fates[case], right)


def _large(run: Run, directory: Path) -> None:
    times = 2 if run.quick else 10
    with Platform(directory / "p", nodes=2) as platform:
        called = migration_large.deployed(run, LARGE, platform, directory)
        fate = Fate(lambda: move(called), lambda count: count >= times, moves=True)
        _case(run, called, LARGE, fate, called.right())


def _case(run: Run, called: Called, name: str, fate: Fate, right: Sequence[Sequence[Any]]) -> None:
    load = Load(called, right)
    with load.running():
        windows = load.windows_of(fate.act, fate.enough)
        load.until_all_hear()
    case, sums = run.case(name, "sllm", "intervals"), load.sums()
    gaps = [round(gap, 2) for heard in load.heard for gap in longest(heard, windows)]
    case.samples = [round(gap, 2) for heard in load.heard for gap in pauses(heard)] if fate.moves else gaps
    took = statistics.median(window.end - window.begin for window in windows)
    interval = statistics.median(heard.usual for heard in load.heard)
    case.extra = {"lost": sums.lost, "repeated": sums.repeated, "different": sums.different}
    case.extra |= {"streams": sums.streams, "events": sums.events, "times": len(windows), "took_s": round(took, 3)}
    case.extra["interval_ms"] = round(interval * 1e3, 2)
    if case.samples:
        case.extra["p99"] = percentile(case.samples, 99)
    if not fate.moves:
        chance = random.Random(SEED)
        jitter = [round(gap, 2) for heard in load.heard for gap in jitters(heard, windows, chance)]
        case.extra |= {"jitter_p50": percentile(jitter, 50), "jitter_p99": percentile(jitter, 99)} if jitter else {}
    if fate.moves and gaps:
        case.extra |= {"longest_p50": percentile(gaps, 50), "longest_p99": percentile(gaps, 99)}
    if fate.moves:
        _judge(run, case, moved(called.platform))


def _judge(run: Run, case: Case, count: int) -> None:
    case.extra["calls_moved"] = count
    for what in ("lost", "repeated", "different"):
        run.aims.append(Aim(f"{case.case}: tokens {what}, {count} calls moved", case.extra[what], at_most=0))
    enough = len(case.samples) >= run.least
    run.aims.append(Aim(f"{case.case}: pause p50, token intervals", case.median if enough else None, at_most=2.0))
    p99 = case.extra.get("p99") if len(case.samples) >= 100 else None
    run.aims.append(Aim(f"{case.case}: pause p99, token intervals", p99, at_most=2.0))


if __name__ == "__main__":
    sys.exit(main("migration", (*SMALL, LARGE, FIGURE3), measure))
