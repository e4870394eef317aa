"""``python -m benchmarks.replay``: bursts of calls over many models and few devices, scheduling policies side by side.

The real platform, four nodes with four virtual devices each (memory and a link of 400 MB/s; what runs there computes on
this machine's cores), 32 functions, each with a model of its own: the demo model's weights under another digest. Models
lie in a store that gives 20 MiB a second to all; the nodes' SSDs have room for 1.5 times as many, their DRAM for half.
Every run begins alike: a copy of each model on one node's SSD, in turn, nothing in memory, warm pools full, each
node's disk and store measured (a node does so in the seconds after it has begun). A seeded trace (``replay_trace``) is
replayed over HTTP, with a thread and a connection for each call: the same one for all systems, in turn, another one in
each round. Ray leaves nothing of the platform in the page cache (who came after it took 1.4 times as long), so each
round begins with a run that is not counted, and then with another policy.

A sample is a call's startup latency: from the moment it was due to its first token at the caller, queueing included;
``<case>_mean`` has the mean of each trace. Calls that were not served wholly within 300 s count with 300 s, and so do
those with a wrong answer: ours are compared, whole, with those of an idle platform, Ray's with those of transformers
alone. ``in_time``: the share of calls that were served, and whose first token came within 5 s. Judged are all calls of
all rounds together, and ratios of two systems in the same round, of which the median counts: a round is one burst.
``not_measured``: runs that began although not all disks and stores were measured. ``moved``: running calls carried over
to another instance. ``preempted``: running calls that went on elsewhere since their instance was stopped.
``ssd_read_mib``: what the disk gave the nodes' loaders, by the kernel's count; no page of the models' copies is cached
when a run begins. ``cold``: calls that waited for a start.

Beside it Ray Serve with as many slots (``replay_peers``; its notes say what it was made to do). ``sweep_devices`` and
``sweep_models``: other numbers of devices a node, or of models, by all policies, one with ``--quick``. ``long``: one
trace of two minutes by all policies. Nothing is moved within half a minute of its start (``SETTLED_S``), so nothing can
be in the short traces, of which seven rounds fit into forty minutes; there it can. A full ``--only replay`` takes so
long, the other cases together half an hour.

What the machine limits: all devices compute on the same cores, so that a burst is as much one of forks and of decoding
as of loads, which all policies share; where each device computes for itself, their differences count for more.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from benchmarks import beginning
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed, Usage, peers_missing
from benchmarks.record import TAIL, Aim, Case, none_of
from benchmarks.replay_client import IN_TIME_S, LIMIT_S, Sums, Told, checked, play, sums
from benchmarks.replay_peers import NOTES, RAY, WHAT, greedy_texts, ray_slots
from benchmarks.replay_platform import (
    LINK,
    STORE_MIB_S,
    Beginning,
    Counts,
    Scene,
    Store,
    caller,
    prepare,
    until_measured,
    until_there,
    write_models,
)
from benchmarks.replay_trace import CV, LENGTHS, Shape, trace
from benchmarks.runner import Run, in_turn, main
from sllm_runtime.platform.nats_server import free_port

OURS: Final = "startup-time"
POLICIES: Final = (OURS, "random", "availability", "locality", "preemption")
ROUNDS: Final = 7
LEAST_CALLS: Final = 300
"""Of a system, below which its p99 is not judged."""


@dataclass(frozen=True)
class Scale:
    """How much is replayed."""

    scene: Scene
    shape: Shape
    """Of each round, and of the sweeps."""
    long: Shape
    devices: tuple[int, ...]
    models: tuple[int, ...]
    swept: tuple[str, ...]
    """Policies of all cases but ``replay``."""
    rounds: int


FULL: Final = Scale(
    Scene(4, 4, 32), Shape(32, 50, 20.0), Shape(32, 250, 120.0), (1, 2, 4), (8, 16, 32), POLICIES, ROUNDS
)
QUICK: Final = Scale(Scene(2, 2, 8), Shape(8, 20, 5.0), Shape(8, 20, 5.0), (1,), (4,), (OURS,), 1)


@dataclass
class Bench:
    """One invocation: what all of its runs begin with, and what was heard in each round, by case and system."""

    run: Run
    scale: Scale
    directory: Path
    store: Store
    beginning: Beginning
    told: dict[tuple[str, str], list[Sequence[Told]]] = field(default_factory=dict)
    runs: int = 0
    of_transformers: dict[int, str] = field(default_factory=dict)
    """The answers of peers, once they are known."""

    def fresh(self) -> Path:
        """A directory that was never used."""
        self.runs += 1
        return self.directory / f"r{self.runs}"

    def ours(
        self, case: str, policy: str, shape: Shape, seed: int, devices: int | None = None, *, counted: bool = True
    ) -> None:
        """One trace on the platform with that policy. Not ``counted``: for what it leaves in the machine's caches."""
        home, scene = self.fresh(), self.scale.scene
        self.beginning.copy(home)
        beginning.drop_copies(home)
        with Platform(home, scene.settings(policy, devices), nodes=scene.nodes) as platform:
            until_there(platform, scene.nodes)
            measured = until_measured(platform, scene, self.store)
            if not measured:
                self.run.note(f"{case}: {policy}: not all disks and stores are measured")
            before, used = Counts.of(platform), platform.program.usage()
            told = play(trace(shape, seed), caller(platform), platform.stop)
            after, spent = Counts.of(platform), platform.program.usage()
        shutil.rmtree(home, ignore_errors=True)
        if not counted:
            return
        told = checked(told, self.beginning.right)
        found = self.add(case, policy, told, Usage(spent.cpu_s - used.cpu_s, spent.pss_mib))
        for name, value in after.since(before).items():
            found.extra[name] = found.extra.get(name, 0) + value
        found.extra["not_measured"] = found.extra.get("not_measured", 0) + (not measured)
        found.extra["cold"] = found.extra.get("cold", 0) + sum(each.cold for each in told)
        self.run.note(f"{case}: {policy}: {_words(told)}")

    def rays(self, case: str, shape: Shape, seed: int) -> None:
        """One trace on Ray Serve with its cache, and without."""
        home = self.fresh()
        self.of_transformers = self.of_transformers or greedy_texts(home / "plain", self.store)
        with ray_slots(home, self.scale.scene.nodes * self.scale.scene.devices, self.store) as ray:
            for kind, name in RAY.items():
                used = ray.program.usage()
                told = play(trace(shape, seed), ray.caller(kind), ray.program.stop)
                spent = ray.program.usage()
                told = checked(told, self.of_transformers)
                self.add(case, name, told, Usage(spent.cpu_s - used.cpu_s, spent.pss_mib)).notes = WHAT + NOTES[kind]
                self.run.note(f"{case}: {name}: {_words(told)}")

    def add(self, case: str, system: str, told: Sequence[Told], usage: Usage) -> Case:
        """Into the record, with the sums over all rounds."""
        rounds = self.told.setdefault((case, system), [])
        rounds.append(told)
        every = joined(rounds)
        found = self.run.case(case, system)
        self.run.case(f"{case}_mean", system).samples.append(round(sums(told).mean, 1))
        found.samples += [round(each.startup_ms, 1) for each in told]
        found.cpu_s = round((found.cpu_s or 0.0) + usage.cpu_s, 2)
        found.peak_rss_mib = round(max(found.peak_rss_mib or 0.0, usage.pss_mib))
        figures = sums(every)
        found.extra |= {key: round(getattr(figures, key), 1) for key in ("p50", "longest", "mean")}
        found.extra |= {"p99": round(figures.p99, 1)} if figures.calls >= TAIL else {}
        found.extra |= {"served": round(figures.served, 4), "in_time": round(figures.in_time, 4)}
        found.extra |= {"wrong": sum(each.wrong for each in every), "traces": len(rounds)}
        if errors := [each.error for each in every if each.error]:
            found.extra["not_served"] = f"{len(errors)}, the first: {errors[0][:200]}"
        return found


def measure(run: Run, cases: Sequence[str]) -> None:
    """Deploy once, then run by run."""
    scale, seed = QUICK if run.quick else FULL, int(run.settings["seed"])
    run.settings |= _settings(scale)
    with tempfile.TemporaryDirectory(prefix="br-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with run.attempt("deploy"):
            store = Store(directory / "store", free_port())
            write_models(store.directory, scale.scene.functions)
            with store.serving():
                bench = Bench(run, scale, directory, store, prepare(directory, scale.scene, store))
            with store.serving(STORE_MIB_S):
                for case in cases:
                    with run.attempt(case):
                        _MEASURES[case](bench, seed)


def _settings(scale: Scale) -> dict[str, object]:
    scene, shape = scale.scene, scale.shape
    return {
        "nodes": scene.nodes,
        "devices_per_node": scene.devices,
        "functions": scene.functions,
        "dram_models_per_node": scene.dram_models,
        "ssd_models_per_node": scene.ssd_models,
        "calls": shape.calls,
        "seconds": shape.seconds,
        "long_calls": scale.long.calls,
        "long_seconds": scale.long.seconds,
        "cv": CV,
        "zipf": shape.skew,
        "tokens": dict(LENGTHS),
        "store_mib_s": STORE_MIB_S,
        "link": LINK,
        "limit_s": LIMIT_S,
        "in_time_s": IN_TIME_S,
        "rounds": scale.rounds,
    }


def _replay(bench: Bench, seed: int) -> None:
    missing = peers_missing()
    try:
        for number in range(bench.scale.rounds):
            bench.ours("replay", OURS, bench.scale.shape, seed + number, counted=False)
            for policy in in_turn(POLICIES, number):
                bench.ours("replay", policy, bench.scale.shape, seed + number)
            if not missing:
                missing = _try_rays(bench, seed + number)
        for name in RAY.values() if missing else ():
            bench.run.case("replay", name).not_run = missing
    finally:
        judge(bench.run, {system: told for (case, system), told in bench.told.items() if case == "replay"})


def _try_rays(bench: Bench, seed: int) -> str:
    """Why they cannot run; empty if they did."""
    try:
        bench.rays("replay", bench.scale.shape, seed)
    except ProgramFailed as error:
        bench.run.note(f"ray serve: {error}")
        return str(error)[:1000]
    return ""


def _sweep_devices(bench: Bench, seed: int) -> None:
    for number, devices in enumerate(bench.scale.devices):
        for policy in in_turn(bench.scale.swept, number):
            bench.ours(f"sweep_devices: {devices} a node", policy, bench.scale.shape, seed, devices)


def _sweep_models(bench: Bench, seed: int) -> None:
    for number, models in enumerate(bench.scale.models):
        for policy in in_turn(bench.scale.swept, number):
            bench.ours(f"sweep_models: {models}", policy, replace(bench.scale.shape, functions=models), seed)


def _long(bench: Bench, seed: int) -> None:
    for policy in bench.scale.swept:
        bench.ours("long", policy, bench.scale.long, seed)


_MEASURES: Final = {"replay": _replay, "sweep_devices": _sweep_devices, "sweep_models": _sweep_models, "long": _long}


def joined(rounds: Sequence[Sequence[Told]]) -> list[Told]:
    """The calls of all of them."""
    return [each for told in rounds for each in told]


def judge(run: Run, told: Mapping[str, Sequence[Sequence[Told]]]) -> None:
    """The aims: of its p99, its mean and the share of calls served in time, ours beside each other system's."""
    for system in (*POLICIES, *(each for each in RAY.values() if each in told)):
        every = joined(told.get(system, ()))
        wrong = sum(each.wrong for each in every)
        run.aims.append(none_of(f"replay: wrong answers, {system}", wrong, of=len(every), least=LEAST_CALLS))
    if not told.get(OURS):
        return
    for other in (*POLICIES[1:], *RAY.values()):
        theirs = told.get(other, ())
        both = list(zip(told[OURS], theirs, strict=False))  # of which both have heard the whole trace
        pairs = [(sums(one), sums(another)) for one, another in both]
        whole = (sums(joined([one for one, _ in both])), sums(joined([one for _, one in both]))) if both else None
        if whole is not None and min(each.calls for each in whole) < LEAST_CALLS:
            whole = None
        beside = f"replay: {OURS} / {other}"
        for what, figure in _FIGURES.items():
            value = _ratio(whole, figure) if whole else None
            run.aims.append(Aim(f"{beside}, {what} startup latency", value, at_most=1.0))
        share = whole[0].in_time / whole[1].in_time if whole and whole[1].in_time else None
        run.aims.append(Aim(f"{beside}, share served within {IN_TIME_S:g} s", share, at_least=1.0))
        for what, figure in _OF_ROUND.items():
            value = statistics.median(_ratio(pair, figure) for pair in pairs) if len(pairs) >= run.least else None
            run.aims.append(Aim(f"{beside}, {what} startup latency of a round (median)", value, at_most=1.0))


_FIGURES: Final[Mapping[str, Callable[[Sums], float]]] = {"p99": lambda of: of.p99, "mean": lambda of: of.mean}
_OF_ROUND: Final[Mapping[str, Callable[[Sums], float]]] = {"longest": lambda of: of.longest, "mean": lambda of: of.mean}


def _ratio(pair: tuple[Sums, Sums], figure: Callable[[Sums], float]) -> float:
    return figure(pair[0]) / figure(pair[1])


def _words(told: Sequence[Told]) -> str:
    figures = sums(told)
    return f"p50 {figures.p50:.0f} ms, p99 {figures.p99:.0f} ms, {figures.served:.1%} served"


if __name__ == "__main__":
    sys.exit(main("replay", tuple(_MEASURES), measure, numbers={"seed": 1}))
