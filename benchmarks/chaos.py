"""``python -m benchmarks.chaos``: processes are killed and stopped, one after the other, under a load of streams.

Two nodes, two gateways, two controllers and the embedded NATS server (``embedded``), or three servers outside, each
with a copy of every stream (``cluster``), of which one at a time is struck. Four callers stream greedy and seeded calls
of the demo model all the time, half of them kept (``Prefer: respond-async`` with an ``Idempotency-Key``), from either
gateway. Faults come in the order that ``--seed`` gives (``chaos_schedule``): every component killed (SIGKILL) and
stopped for 2 to 8 s (SIGSTOP), each kind once before any comes again. The next one strikes when each caller has heard
something since the last and there is somebody to strike, whatever is still being started again by then. All the while
one instance after the other is moved to the other node (``sllm migrate``), with the calls that run there; a fault that
comes upon a move is counted as such. A sample is the
longest gap of one stream between one fault and the next; one that both fall into counts for both.

Every stream is compared, event by event, with the answer of the same call where nothing happened. Lost is a call that
does not end with the right end, after all that a client may do: ask again at the other gateway from the last event
that it has, or call again where nobody knows a stream that had hardly begun (``called_again``: none is the aim), or
where a gateway died before it told the id of a call that is not kept, of which nobody can know whether it runs
(``called_anew``). CPU seconds are at least: what a process that was killed had used nobody knows. The notes say how
many of the controllers and NATS servers that were struck were leading. At the end the same processes have to be there
as at the beginning. No memory may be in use that is no model's: of what loaderds count as
used nothing beyond the models that they have, and no chunk that somebody holds and no loaderd has. Nor may any daemon's
own memory (of gateways, controllers, invokers, loaderds) be larger by more than GROWN_MIB than before the first fault.

What went wrong is a missed aim in any run. That nothing did says nothing in a full run unless 20 faults of each kind
met a call in flight, in a quick one unless 6 in all did.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos_client import Callers, Told
from benchmarks.chaos_faults import (
    Field,
    Tally,
    Victim,
    counted,
    gateways_of,
    heaps_mib,
    settled_mib,
    shared_mib,
    strike,
    until_nothing_left,
)
from benchmarks.chaos_moves import Mover, Moves
from benchmarks.chaos_schedule import KINDS, STOPPED_S, Fault, schedule
from benchmarks.cold_cases import CODER
from benchmarks.heard import Sums
from benchmarks.nats_cluster import NatsCluster
from benchmarks.platform import Platform
from benchmarks.record import Aim, Case, none_of, tail
from benchmarks.runner import Run, main

CALLERS: Final = 4
INSTANCES: Final = 2
NODES: Final = ("n1", "n2")
SLOTS: Final = 3
"""Of each instance: one that is ready has a call of four that run."""
TOKENS: Final = 400
ASKS: Final = tuple(
    {"prompt": prompt, "temperature": temperature, "seed": 7}
    for prompt in ("class Parser", "def ")
    for temperature in (0.0, 0.8)
)
SETTINGS: Final = {"SLLM_CONTROLLERS": "2", "SLLM_PRELOAD": "engine"}
LEAST_OF_EACH: Final = 20
LEAST_IN_ALL: Final = 6
GROWN_MIB: Final = 16.0
"""Gateways remember a thousand calls, controllers what they have learned."""


@dataclass(frozen=True)
class Struck:
    """A fault that happened. ``met``: a call was in flight at its victim; ``moving``: an instance was being moved."""

    fault: Fault
    victim: Victim
    begin: float
    end: float
    met: bool
    moving: bool = False
    leads: bool | None = None
    """As ``Field.leads``."""


@dataclass
class Outcome:
    """What came of a time of faults."""

    struck: list[Struck] = field(default_factory=list)
    told: list[Told] = field(default_factory=list)
    processes_left: Counter[str] = field(default_factory=Counter)
    shared_mib: tuple[float, float] = (0.0, 0.0)
    """What models and pools' reserves hold, before and after."""
    memory_left_mib: float = 0.0
    """As ``chaos_faults.left_mib``."""
    heaps_mib: tuple[dict[str, float], dict[str, float]] = field(default_factory=lambda: ({}, {}))
    """Daemons' own memory, before and after."""
    sums: Sums = field(default_factory=Sums)
    moves: Moves = field(default_factory=Moves)
    """Of instances."""
    tallies: dict[str, Tally] = field(default_factory=lambda: {"resumed": Tally(), "moved": Tally()})

    def count(self, gateways: Sequence[str], token: str) -> None:
        """Look at what the gateways count: calls resumed, calls moved."""
        for what, tally in self.tallies.items():
            tally.take(counted(gateways, token, what))

    @property
    def grown(self) -> tuple[float, str]:
        """By how many MiB a daemon's own memory is larger than it was, at most, and whose."""
        before, after = self.heaps_mib
        return max(((after[name] - before[name], name) for name in before if name in after), default=(0.0, ""))

    @property
    def called_again(self) -> int:
        """Calls that began anew, since nobody knew them."""
        return sum(told.again for told in self.told)

    def leaders(self) -> str:
        """Which controllers and servers of NATS were struck, in words."""
        known = Counter((str(each.fault.kind), each.leads) for each in self.struck if each.leads is not None)
        return "; ".join(
            f"{kind}: {known[kind, True]} leading, {known[kind, False]} not" for kind in sorted({of for of, _ in known})
        )

    def met(self) -> Counter[str]:
        """Faults that met a call in flight, by kind."""
        return Counter(str(each.fault.kind) for each in self.struck if each.met)

    def lost(self) -> list[Told]:
        """Calls that ended otherwise than they should have."""
        return [told for told in self.told if told.heard.error]

    def gaps(self, kind: str) -> list[float]:
        """Seconds without an event from each fault of a kind to the next fault, of all streams that it came upon."""
        ends = [each.begin for each in self.struck[1:]] + [float("inf")]
        times = [(each.begin, end) for each, end in zip(self.struck, ends, strict=True) if str(each.fault.kind) == kind]
        running = [(told, *time) for time in times for told in self.told if told.came_upon(time[0])]
        found = [told.gap(begin, end) for told, begin, end in running]
        return [gap for gap in found if gap is not None]


@dataclass(frozen=True)
class Plan:
    """How long, and with which faults. ``least`` in all and ``least_of_each`` kind are to meet a call, however long
    that takes. ``function``: what is called, with arguments of the demo's, for so many ``tokens``."""

    seed: int
    seconds: float
    least: int = LEAST_IN_ALL
    least_of_each: int = 0
    longest_s: float = STOPPED_S[1]
    cluster: bool = False
    function: Path = CODER
    tokens: int = TOKENS

    @property
    def asks(self) -> tuple[dict[str, Any], ...]:
        """The calls' arguments."""
        return tuple({**ask, "max_tokens": self.tokens} for ask in ASKS)

    def enough(self, met: Counter[str]) -> bool:
        """Whether so many have."""
        return met.total() >= self.least and all(met[str(kind)] >= self.least_of_each for kind in KINDS)


def measure(run: Run, cases: Sequence[str]) -> None:
    """For each case one platform and one time of faults."""
    minutes = 1.0 if run.quick else float(run.settings["minutes"])
    run.settings.update(minutes=minutes, callers=CALLERS, tokens=TOKENS, nodes=len(NODES), gateways=2, controllers=2)
    for case in cases:
        with run.attempt(case), tempfile.TemporaryDirectory(prefix="bx-", ignore_cleanup_errors=True) as name:
            each, cluster = 0 if run.quick else LEAST_OF_EACH, case == "cluster"
            plan = Plan(int(run.settings["seed"]), 60.0 * minutes, least_of_each=each, cluster=cluster)
            judge(run, wreck(run, Path(name), plan, run.case(case, "sllm")), case)


def wreck(run: Run, directory: Path, plan: Plan, whole: Case) -> Outcome:
    """Faults under load; what the platform spends meanwhile stands in ``whole``. Raises ``ProgramFailed`` if it does
    not come back from one."""
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        nats = stack.enter_context(NatsCluster(directory / "nats")) if plan.cluster else None
        settings = {**SETTINGS, **nats.env} if nats is not None else SETTINGS
        platform = stack.enter_context(Platform(directory / "p", settings, nodes=len(NODES), gateways=2))
        name = platform.deploy(
            plan.function,
            keep_alive=3600.0,
            concurrency=SLOTS,
            min_instances=INSTANCES,
            max_instances=INSTANCES,
            timeout=200.0,
        )
        run.note("deployed")
        with ThreadPoolExecutor(len(plan.asks)) as pool:
            right = [answer.values for answer in pool.map(functools.partial(platform.stream, name), plan.asks)]
        place, urls = Field(platform, name, nats), gateways_of(platform)
        place.until_ready(INSTANCES)
        platform.until_cold()
        run.note("the right answers are known, and all processes there")
        held, heaps = settled_mib(platform), heaps_mib(platform)
        before = place.processes()  # now that pools are whole
        callers = Callers(urls, platform.token, name, plan.asks, CALLERS)
        mover = Mover(place, urls, platform.token, NODES, plan.seed)
        with run.spending(platform.program.usage, whole), callers.running(), mover.running():
            _strike_on(run, place, callers, mover, plan, outcome)
        outcome.told, outcome.moves = callers.told, mover.moves
        outcome.count(urls, platform.token)
        outcome.processes_left = place.beyond(before)
        place.until_back(before)
        outcome.memory_left_mib = until_nothing_left(platform, NODES)
        outcome.shared_mib, outcome.heaps_mib = (held, shared_mib(platform)), (heaps, heaps_mib(platform))
    _compare(run, outcome, right)
    return outcome


def _strike_on(run: Run, place: Field, callers: Callers, mover: Mover, plan: Plan, outcome: Outcome) -> None:
    """One fault after the other, until the time is over and enough of them met a call."""
    faults, until = schedule(plan.seed, plan.longest_s), time.monotonic() + plan.seconds
    while time.monotonic() < until or not plan.enough(outcome.met()):
        fault = next(faults)
        time.sleep(fault.gap_s)
        place.victim(fault)  # there is somebody
        callers.until_all_hear(time.monotonic())
        outcome.count(callers.gateways, callers.token)
        victim = place.victim(fault)  # not one that has gone, or moved away, while all were waited for
        leads = place.leads(victim)
        met, moving = _meets(callers, victim), mover.moving
        begin = time.monotonic()
        if not strike(victim, fault):
            run.note(f"{victim.name} had gone")
            continue
        place.mend()
        outcome.struck.append(Struck(fault, victim, begin, time.monotonic(), met, moving, leads))
        how = f"{'met' if met else 'met no call'}{', in a move' if moving else ''}"
        run.note(f"{victim.name} {fault.kind.signal} {fault.stopped_s:.1f} s, {how}")
    callers.until_all_hear(time.monotonic())


def _meets(callers: Callers, victim: Victim) -> bool:
    """A gateway is met by who reads there, anything else by more calls than one instance can have."""
    return callers.in_flight(victim.gateway) > 0 if victim.gateway else callers.in_flight() > SLOTS


def _compare(run: Run, outcome: Outcome, right: Sequence[Sequence[Any]]) -> None:
    """Every stream with the right answer; one that ended early with the beginning of it."""
    for told in outcome.lost():
        run.note(f"lost: {told.call} at {told.gateways[-3:]}, {len(told.heard.ids)} events: {told.heard.error}")
    for told in outcome.told:
        wanted, before = right[told.heard.ask], outcome.sums.wrong
        outcome.sums.add(told.heard, wanted[: len(set(told.heard.ids))] if told.heard.error else wanted)
        if outcome.sums.wrong > before:
            kind = "kept" if told.kept else "plain"
            run.note(f"wrong: {told.call}, {kind}, cut {told.cuts} times at {told.gateways}, {where(told, wanted)}")


def where(told: Told, wanted: Sequence[Any]) -> str:
    """Which events of a stream are not there, come again or differ, in words."""
    ids = told.heard.ids
    missing = sorted(set(range(len(wanted))) - set(ids))
    again = sorted(at for at, times in Counter(ids).items() if times > 1)
    other = [at for at, value in zip(ids, told.heard.values, strict=True) if at >= len(wanted) or wanted[at] != value]
    found = {"lost": missing, "repeated": again, "changed": other}
    return ", ".join(f"{len(each)} {what} ({each[0]} to {each[-1]})" for what, each in found.items() if each)


def judge(run: Run, outcome: Outcome, case: str) -> None:
    """Figures by kind of fault, and the aims."""
    met, sums = outcome.met(), outcome.sums
    whole = run.case(case, "sllm")
    whole.extra = {"faults": len(outcome.struck), "met": met.total(), "streams": sums.streams, "events": sums.events}
    whole.extra |= {
        "cuts": sum(told.cuts for told in outcome.told),
        "called_again": outcome.called_again,
        "called_anew": sum(told.anew for told in outcome.told),
    }
    whole.extra |= {what: tally.sum for what, tally in outcome.tallies.items()}
    moves = {"asked": outcome.moves.asked, "done": outcome.moves.done, "refused": outcome.moves.refused}
    whole.extra |= {f"moves_{what}": count for what, count in moves.items()}
    whole.notes = outcome.leaders()
    whole.extra["left"] = dict(outcome.processes_left)
    whole.extra["faults_in_moves"] = sum(each.moving for each in outcome.struck)
    grown, whose = outcome.grown
    whole.extra |= dict(zip(("shared_mib_before", "shared_mib_after"), outcome.shared_mib, strict=True))
    whole.extra |= {"heaps_mib": dict(zip(("before", "after"), outcome.heaps_mib, strict=True)), "grown_most": whose}
    for kind in map(str, KINDS):
        found = run.case(f"{case}: {kind}", "sllm")
        found.samples = [round(gap * 1e3, 1) for gap in outcome.gaps(kind)]
        found.extra = {"met": met[kind]} | tail(found.samples)
        whole.samples += found.samples
    enough = Plan(0, 0.0, least_of_each=0 if run.quick else LEAST_OF_EACH).enough(met)
    figures = {
        "calls lost": len(outcome.lost()),
        "tokens lost": sums.lost,
        "tokens repeated": sums.repeated,
        "tokens changed": sums.different,
        "processes left": outcome.processes_left.total(),
        "memory of models left, MiB": outcome.memory_left_mib,
        "calls begun again": outcome.called_again,
    }
    for what, value in figures.items():
        run.aims.append(none_of(f"{case}: {what}", value, of=int(enough), least=1))
    most = round(grown, 1)
    run.aims.append(Aim(f"{case}: memory that a daemon has grown by, MiB", most if enough else None, at_most=GROWN_MIB))


if __name__ == "__main__":
    sys.exit(main("chaos", ("embedded", "cluster"), measure, numbers={"minutes": 30.0, "seed": 1}))
