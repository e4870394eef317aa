"""``python -m benchmarks.migration``: running calls move between two nodes, back and forth, while their callers read.

Four callers stream all the time, greedy and seeded, from one instance of the demo model that computes them in one
batch; no token is delayed. Their threads have priority over all that shares the cores with them (``hear_at_once``),
since callers are elsewhere and wait for none of it. ``move``: ``POST /instances/{instance}/migrate`` again and again,
the next one asked for when the last has ended and all callers hear something, each carrying over what runs then. A
migration is one move of an instance that took calls along; counted are those, and the calls that moved (the gateway's
own count). ``resume``: the worker is killed instead, and its calls go on at a new instance from their tokens.
``restart``: it is killed where nothing is resumable: a new instance begins from nothing, and the callers make their
calls anew. ``still``: as long with none of it. ``beside``: neither, but another function with the same model prefills
and begins as many calls again and again, as a destination does: how far instances that share this machine's cores slow
each other. ``apart``: as ``move``, until four hundred calls have moved, where gateway, controller and NATS wait for no
core either, since a cluster has them on machines of their own (``infra/terraform``). ``large``: as ``move``, until a
hundred calls have moved, with a model of 0.5 G parameters (``migration_large``); ``gpu``: such a model on a GPU.
``figure3``: what a start that wants the place of a running call does to both, by policy (``migration_policies``).

Every stream is compared, event by event, with the answer of the same call where nothing happened: lost and repeated by
the events' ids, different by their values; one that breaks off is counted as such, and with what it did not say.

Two measures, each a case. ``<case>``: the longest gap between two events of a call from the command until it is over;
in it the destination starts, prefills, and computes on the cores that the source has. Of ``restart`` it is the gap
between what came last and the first event that had not come before. ``<case>_pause``: the longest gap around the moment
at which a call went over, by the timeline that ends its stream: from one interval before until what the gateway may
have had in reserve then is used up (``heard.around``); of the cases in which none goes over, what that rule finds at
random moments. Both are in mean intervals of calls that nothing befell: the callers make whole ones before the first
command of a case and after its last (``interval_ms``). ``own_*``: the same in intervals of the call itself, which its
own gaps make longer (``own_interval_ms``).
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import migration_large, migration_policies
from benchmarks.cold_cases import CODER
from benchmarks.heard import Heard, Sums, Window, jitters, longest, pauses, there, untouched
from benchmarks.machine import describe
from benchmarks.migration_load import CALLERS, Called, Load, kill, move, moved, set_apart
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, Case, none_of, tail
from benchmarks.runner import Run, main

TOKENS: Final = 800
ASKS: Final = tuple(
    {"prompt": prompt, "max_tokens": TOKENS, "temperature": temperature, "seed": 7}
    for prompt in ("class Parser", "def ", "import os\n", "    return ")
    for temperature in (0.0, 0.8)
)
BESIDE: Final = tuple({**ask, "prompt": "def f(x):\n    return x\n" * 40, "max_tokens": 60} for ask in ASKS[:CALLERS])
LEAST: Final = 100
"""Pauses below which their p99 is not judged."""
MANY: Final = 480
"""Windows of streams to which nothing happens: one in four ends within its window, and what is left has a p99."""
STILL_S: Final = 1.0
ANEW_S: Final = 2.0
"""Of the three or so that a call takes: after its begin it is struck within them."""
SEED: Final = 1
APART: Final = "apart"
SMALL: Final = ("still", "beside", "resume", "restart", "move", APART)
"""In this order: what is set apart stays so."""
LARGE: Final = "large"
GPU: Final = "gpu"
FIGURE3: Final = "figure3"
ABANDONED: Final = 10
"""Migrations that were abandoned: the next ones would be, too."""


@dataclass
class Counts:
    """What became of the calls: of how many migrations that took calls along, and that were abandoned."""

    migrations: int = 0
    calls: int = 0
    abandoned: int = 0

    def add(self, done: bool, calls: int) -> None:
        """One more, ``done`` or abandoned, by which so many calls moved. Raises ``ProgramFailed`` after too many that
        were abandoned."""
        self.abandoned += not done
        self.migrations += calls > 0
        self.calls += calls
        if self.abandoned >= ABANDONED:
            raise ProgramFailed(f"{self.abandoned} migrations were abandoned")


@dataclass(frozen=True)
class Fate:
    """What befalls the calls of ``called`` again and again. ``enough``: whether so many times are. ``counts``: they go
    over by it."""

    called: Called
    act: Callable[[], object]
    enough: Callable[[int], bool]
    counts: Counts | None = None
    wanted: int = 0
    """Migrations that are an aim."""

    @classmethod
    def moving(cls, called: Called, enough: Callable[[Counts], bool], wanted: int = 0) -> Fate:
        """They move."""
        counts = Counts()

        def act() -> None:
            before = moved(called.platform)
            done = move(called)
            counts.add(done, moved(called.platform) - before)

        return cls(called, act, lambda _: enough(counts), counts, wanted)


def measure(run: Run, cases: Sequence[str]) -> None:
    """The cases of the demo model on one platform of two nodes, one after the other."""
    with tempfile.TemporaryDirectory(prefix="bm-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if small := [case for case in cases if case in SMALL]:
            with run.attempt("demo model", "intervals"):
                _small(run, directory / "p", small)
        for case in (LARGE, GPU):
            if case in cases:
                with run.attempt(case, "intervals"):
                    _large(run, case, directory / case)
        if FIGURE3 in cases:
            with run.attempt(FIGURE3):
                migration_policies.measure(run, FIGURE3, directory / FIGURE3)


def _small(run: Run, directory: Path, cases: Sequence[str]) -> None:
    run.settings.update(callers=CALLERS, tokens=TOKENS)
    with Platform(directory, nodes=2) as platform:
        called = _called(platform, "coder", ASKS)
        right = called.right()
        for case in cases:
            if case == APART and not set_apart(platform):
                run.case(case, "sllm", "intervals").not_run = "no right to real-time priority on this machine"
                continue
            with run.attempt(case, "intervals"):
                _case(run, case, _fate(run, case, called), right)


def _called(platform: Platform, name: str, asks: Sequence[Mapping[str, Any]], resumable: bool = True) -> Called:
    """The demo model as a function of that name."""
    platform.deploy(CODER, name=name, keep_alive=600.0, concurrency=2 * CALLERS, resumable=resumable)
    return Called(platform, name, asks, anew=not resumable)


def _fate(run: Run, case: str, called: Called) -> Fate:
    wanted = 100 if run.quick else 1000
    if case == "still":
        windows = 2 * run.rounds if run.quick else MANY // CALLERS
        return Fate(called, lambda: time.sleep(STILL_S), lambda count: count >= windows)
    if case == "beside":
        beside = _called(called.platform, case, BESIDE)
        return Fate(called, beside.right, lambda count: count >= 2 * run.rounds)
    if case == "resume":
        return Fate(called, lambda: kill(called), lambda count: count >= run.rounds)
    if case == "restart":
        again = _called(called.platform, case, ASKS, resumable=False)
        return Fate(again, lambda: kill(again), lambda count: count >= run.rounds)
    if case == APART:
        return Fate.moving(called, lambda counts: counts.calls >= (0.4 if run.quick else 4) * LEAST)
    run.settings["migrations"] = wanted
    return Fate.moving(called, lambda counts: counts.migrations >= wanted, wanted)


def _large(run: Run, case: str, directory: Path) -> None:
    gpu = case == GPU
    if gpu and not describe()["accelerators"]:
        run.case(case, "sllm", "intervals").not_run = "no GPU on this machine"
        return
    with Platform(directory / "p", migration_large.GPU if gpu else None, nodes=2) as platform:
        called = migration_large.deployed(run, case, platform, directory, gpu=gpu)
        # Of a call that ends while it moves no pause is known.
        few = run.quick and not gpu
        enough = (lambda counts: counts.migrations >= 2) if few else (lambda counts: counts.calls >= 1.5 * LEAST)
        _case(run, case, Fate.moving(called, enough), called.right())


def _case(run: Run, name: str, fate: Fate, right: Sequence[Sequence[Any]]) -> None:
    """Told and judged also where something broke meanwhile."""
    load, windows, chance = Load(fate.called, right), list[Window](), random.Random(SEED)
    try:
        with run.spending(fate.called.platform.program.usage, run.case(name, "sllm", "intervals")), load.running():
            load.until_all_make_a_whole_call()
            while not fate.enough(len(windows)):
                windows.append(load.window_of(fate.act))
                if fate.called.anew:  # struck once each, at any of its tokens
                    load.until_all_begin()
                    time.sleep(chance.uniform(0.0, ANEW_S))
            load.until_all_make_a_whole_call()
    finally:
        tell(run, name, load, windows, fate)


def tell(run: Run, name: str, load: Load, windows: Sequence[Window], fate: Fate) -> None:
    """What the streams of a case were, and its aims."""
    case, pause = (run.case(each, "sllm", "intervals") for each in (name, f"{name}_pause"))
    sums, counts, chance = load.sums(), fate.counts, random.Random(SEED)
    case.extra = {"lost": sums.lost, "repeated": sums.repeated, "different": sums.different, "broken": sums.broken}
    case.extra |= {"streams": sums.streams, "events": sums.events, "times": len(windows)}
    case.extra["callers_at_once"] = load.at_once
    if windows:
        case.extra["took_s"] = round(statistics.median(window.end - window.begin for window in windows), 3)
    still = untouched(load.heard, windows)
    interval = statistics.median(heard.usual for heard in still) if still else None
    measure_gaps(case, load.heard, interval, lambda heard: longest(heard, there(heard, windows)))
    measure_gaps(pause, load.heard, interval, pauses if counts else lambda heard: jitters(heard, windows, chance))
    if error := next((heard.error for heard in load.heard if heard.error), ""):
        case.notes = f"the first stream that broke off: {error}"
    judge(run, case, pause, sums, counts, fate.wanted)


def measure_gaps(
    case: Case, streams: Sequence[Heard], interval: float | None, gaps_of: Callable[[Heard], Sequence[float]]
) -> None:
    """What ``gaps_of`` finds, in seconds, of each stream: in intervals of calls that nothing befell (None: there are
    none, so it is no sample), and of the stream itself."""
    gaps = [(heard, gap) for heard in streams for gap in gaps_of(heard)]
    own = [round(gap / heard.usual, 2) for heard, gap in gaps]
    if own:
        case.extra["own_interval_ms"] = round(statistics.median(heard.usual for heard, _ in gaps) * 1e3, 2)
        case.extra |= {"own_n": len(own), "own_p50": statistics.median(own)} | {
            f"own_{key}": value for key, value in tail(own).items()
        }
    if interval is not None:
        case.samples = [round(gap / interval, 2) for _, gap in gaps]
        case.extra |= {"interval_ms": round(interval * 1e3, 2)} | tail(case.samples)


def judge(run: Run, case: Case, pause: Case, sums: Sums, counts: Counts | None, wanted: int) -> None:
    """The zero aims of any case; of one that moves calls also how many, their pauses and their longest gaps."""
    name, of = case.case, ""
    times = case.extra.get("times", 0) if sums.streams else 0
    if counts is not None:
        case.extra |= {"migrations": counts.migrations, "calls_moved": counts.calls, "abandoned": counts.abandoned}
        of = f", {counts.migrations} migrations of {counts.calls} calls"
    wrong = {"tokens lost": sums.lost, "tokens repeated": sums.repeated, "tokens different": sums.different}
    for what, count in {**wrong, "streams broken off": sums.broken}.items():
        run.aims.append(none_of(f"{name}: {what}{of}", count, of=times, least=run.least))
    if counts is None:
        return
    if wanted:
        run.aims.append(Aim(f"{name}: migrations", counts.migrations, at_least=wanted))
    for what, each in (("pause", pause), ("longest gap from the command on", case)):
        own = each.extra.get("own_n", 0)
        for unit, count, p50, p99 in (
            ("intervals of calls that nothing befell", len(each.samples), each.median, each.extra.get("p99")),
            ("intervals of the moved call", own, each.extra.get("own_p50"), each.extra.get("own_p99")),
        ):
            run.aims.append(Aim(f"{name}: {what} p50, {unit}", p50 if count >= run.least else None, at_most=2.0))
            run.aims.append(Aim(f"{name}: {what} p99, {unit}", p99 if count >= LEAST else None, at_most=2.0))


if __name__ == "__main__":
    sys.exit(main("migration", (*SMALL, LARGE, GPU, FIGURE3), measure))
