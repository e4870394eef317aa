"""``python -m benchmarks.scheduler``: how many placements a second one controller decides.

A decision is ``Policy.place`` on the view as it is then: what was placed before is in the view, and as the cluster is
four fifths full each placement is followed by the end of another instance, so that the view changes as it does in
service (the changes themselves are not timed). Models are asked for by Zipf's law. ``decide``: each policy on 100 nodes
with eight accelerators and 1,000 models; ``locality`` once more where models are asked for evenly, since the few that
Zipf's law prefers have no place left where their weights are, and a decision to wait is soon made. ``moves``: the same
where what runs can be moved away, or stopped, for a quicker start (``extra``: how many decisions were to do so). Each
policy has the aim. ``crowd``: whole plans of each policy, which change the view as well, where 300 versions lack an
instance at once, until each was looked at: decisions a second, and the longest plan. ``growth``: the default policy on
10 to 1,000 nodes with ten models each.

``acquire`` is measured from end to end: a gateway asks a real controller process over a real NATS server. The nodes, 10
to 1,000 of them, are simulated (``scheduler_nodes``): they report and obey over NATS as invokers do, and what they
start is READY at once. So a start is what the control plane adds to one: the question, the decision, the command to the
node, its report, the route. Beside it, the answer where an instance is there. ``sync``: writes of the state, which are
on the disk when they are acknowledged, beside the server's default (``scheduler_sync``). A full run takes about 12
minutes, a quick one two. CPU seconds of ``decide``, ``moves``, ``crowd`` and ``growth`` are this process's, with the
changes of the view; of ``acquire`` the controller's; of ``sync`` the server's.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import scheduler_acquire, scheduler_sync
from benchmarks.programs import own_usage
from benchmarks.record import Aim, Case, percentile
from benchmarks.runner import Run, in_turn, main
from benchmarks.scheduler_cluster import GPUS, NOW, cluster, ended, request, started
from sllm_runtime.control.placement import Decision, Place, Policy, Request
from sllm_runtime.control.plan import Context, plan
from sllm_runtime.control.scheduling.policies import DEFAULT, POLICIES, Preemption, StartupTime
from sllm_runtime.control.view import Key, View

NODES: Final = 100
MODELS: Final = 1000
FULL: Final = 0.8
ZIPF: Final = 1.1
LOCALITY: Final = "locality"
CROWD: Final = 300
"""Versions that lack an instance: more than there is room for."""


def measure(run: Run, cases: Sequence[str]) -> None:
    """Policies in turn."""
    if "decide" in cases:
        with run.attempt("decide"):
            _decide(run)
    if "moves" in cases:
        with run.attempt("moves"):
            _moves(run)
    if "crowd" in cases:
        with run.attempt("crowd"):
            _crowd(run)
    if "growth" in cases:
        with run.attempt("growth"):
            _growth(run)
    if "acquire" in cases:
        for nodes in (10, 100, 1000):
            with run.attempt(f"acquire, {nodes} nodes", "1/s"), tempfile.TemporaryDirectory(prefix="bs-") as name:
                scheduler_acquire.measure(run, nodes, Path(name) / "daemons")
    if "sync" in cases:
        with run.attempt("sync", "1/s"), tempfile.TemporaryDirectory(prefix="bs-") as name:
            scheduler_sync.measure(run, Path(name))


def _decide(run: Run) -> None:
    view, keys = cluster(NODES, MODELS, random.Random(1))
    by_zipf, evenly = (Asked(keys, evenly=each) for each in (False, True))
    count = 500 if run.quick else 3000
    ways = {name: (policy, by_zipf, _filled(view, by_zipf)) for name, policy in POLICIES.items()}
    ways[f"{LOCALITY}, asked for evenly"] = (POLICIES[LOCALITY], evenly, _filled(view, evenly))
    for number in range(run.rounds):
        for name, (policy, asked, warm) in in_turn(tuple(ways.items()), number):
            _sample(run, run.case("decide", name, "1/s"), policy(), warm, asked, count, seed=number)
    for name in ways:
        run.aims.append(_rate(run, "decide", name, "no migration", 10_000))


def _rate(run: Run, case: str, policy: str, how: str, least: int) -> Aim:
    made = run.case(case, policy, "1/s")
    value = made.median if len(made.samples) >= run.least else None
    return Aim(f"{case}: decisions per second, 100 nodes x 8, {how}, {policy}", value, at_least=least)


def _moves(run: Run) -> None:
    """As ``decide``, where every call could go on elsewhere: by moving it, or by stopping it."""
    view, keys = cluster(NODES, MODELS, random.Random(1))
    asked = Asked(keys)
    warm = _filled(view, asked, carries=True)
    count = 300 if run.quick else 2000
    ways: dict[str, Policy] = {"startup-time": StartupTime(moves=True), "preemption": Preemption()}
    for number in range(run.rounds):
        for name, policy in in_turn(tuple(ways.items()), number):
            _sample(run, run.case("moves", name, "1/s"), policy, warm, asked, count, seed=number, carries=True)
    for name in ways:
        run.aims.append(_rate(run, "moves", name, "with search", 2_000))


def _crowd(run: Run) -> None:
    """One call waits for each of the versions that are asked for least. Plans until each has had its turn, by a policy
    that has seen the view; ``longest_ms``: for so long a controller does nothing else."""
    view, keys = cluster(NODES, MODELS, random.Random(1))
    view = _filled(view, Asked(keys), carries=True)
    lacking = [key for key in reversed(keys) if not view.of(key)][:CROWD]
    for key in lacking:
        view = view.put_waiting(key, "gw", 1)
    for number in range(run.rounds):
        for name, policy in in_turn(tuple(POLICIES.items()), number):
            _plans(run, run.case("crowd", name, "1/s"), view, _Counting(policy()), random.Random(number))


def _plans(run: Run, case: Case, view: View, asked: _Counting, rng: random.Random) -> None:
    times = []
    plan(view, Context(NOW, 0.0, asked, rng))
    asked.count = 0
    with run.spending(own_usage, case):
        for _ in range(1 if run.quick else 5):
            there, more = view, True
            while more:
                began = time.perf_counter()
                made = plan(there, Context(NOW, 0.0, asked, rng))
                times.append(time.perf_counter() - began)
                there, more = made.view, made.more
            assert not there.unlooked
            assert len(there.pending) + len(there.instances) - len(view.instances) >= CROWD
    case.samples.append(round(asked.count / sum(times)))
    case.extra["longest_ms"] = round(max(*times, case.extra.get("longest_ms", 0.0) / 1e3) * 1e3, 1)
    case.extra |= {"plans": len(times), "decisions": asked.count}


@dataclass
class _Counting:
    """A policy, and how often it has decided."""

    policy: Policy
    count: int = 0

    def place(self, request: Request, view: View, now: float, rng: random.Random) -> Decision:
        self.count += 1
        return self.policy.place(request, view, now, rng)


def _growth(run: Run) -> None:
    for nodes in (10, 30, 100, 300, 1000):
        view, keys = cluster(nodes, nodes * 10, random.Random(1))
        asked = Asked(keys)
        warm = _filled(view, asked)
        for number in range(run.rounds):
            case = run.case("growth", f"{nodes} nodes", "1/s")
            _sample(run, case, POLICIES[DEFAULT](), warm, asked, 100 if run.quick else 500, seed=number)


@dataclass(frozen=True)
class Asked:
    """Which function is asked for: by its popularity, or any."""

    keys: Sequence[Key]
    evenly: bool = False

    def one(self, rng: random.Random) -> Key:
        """The next one."""
        if self.evenly:
            return rng.choice(self.keys)
        return self.keys[min(int(rng.paretovariate(ZIPF)) - 1, len(self.keys) - 1)]


def _filled(view: View, asked: Asked, *, carries: bool = False) -> View:
    """Four fifths of all accelerators work."""
    rng, policy = random.Random(2), POLICIES[DEFAULT]()
    wanted = int(len(view.nodes) * GPUS * FULL)
    for number in range(wanted):
        key = asked.one(rng)
        decision = policy.place(request(view, key), view, NOW, rng)
        if isinstance(decision, Place):
            view = started(view, key, decision, f"i{number}", carries=carries)
    return view


def _sample(
    run: Run,
    case: Case,
    policy: Policy,
    view: View,
    functions: Asked,
    count: int,
    seed: int,
    *,
    carries: bool = False,
) -> None:
    """``count`` decisions, the cluster staying as full as it is."""
    rng, times, kinds = random.Random(seed), [], Counter[str]()
    with run.spending(own_usage, case):
        for number in range(count):
            key = functions.one(rng)
            asked = request(view, key)
            began = time.perf_counter()
            decision = policy.place(asked, view, NOW, rng)
            times.append(time.perf_counter() - began)
            kinds[type(decision).__name__.lower()] += 1
            if isinstance(decision, Place):
                oldest = next(iter(view.instances.values()))
                view = ended(started(view, key, decision, f"s{number}", carries=carries), oldest)
    case.samples.append(round(count / sum(times)))
    case.extra |= kinds
    for p in (50, 99):
        case.extra[f"p{p}_us"] = round(percentile([t * 1e6 for t in times], p), 1)


if __name__ == "__main__":
    sys.exit(main("scheduler", ("decide", "moves", "crowd", "growth", "acquire", "sync"), measure))
