"""``python -m benchmarks.gateway``: streams through the platform beside the same from a bare endpoint and from peers.

Systems, all on loopback and all up during the whole run: ours (`sllm up`, one node; the function
``benchmarks/functions/paced`` on one real worker, through gateway, NATS and invoker), a bare starlette SSE endpoint
that makes the same tokens itself (uvicorn, uvloop, httptools: as our gateway), Ray Serve's proxy with one replica that
makes them, LiteLLM's proxy before the bare endpoint. A peer stands still (SIGSTOP) while another system is measured:
what Ray's dozen processes do while nobody asks would count as the others' delay. Ours never does. One load generator
for all, in a process of its own; its CPU seconds are reported apart (``generator_cpu_s``), ``cpu_s`` is the system's
whole process tree per load. Nothing is pinned to a core. Every connection is open before its request is sent. All
functions are warm.

- ``ttft``: one stream at a time; from the request's send to the first token's last byte at the client. A sample is a
  round's median.
- ``burst_*``: all requests at once, 100 tokens each as fast as they are made; tokens over the time from the first
  request to the last byte.
- ``paced_*``: streams of a token every 20 ms, begun evenly over a second. Token delay: from the moment a token was due
  by its stream's pace (it says so itself) to its last byte at the client, on CLOCK_MONOTONIC; p99 over all tokens.

The numbers of streams are 200, N and 1000: N is the most at which the bare endpoint, measured as all are, keeps the
pace in this run (p99 of its token delay within one interval), at most 1000. Tokens are checked: all of them, in order,
due when the pace says; a stream with others is an error. A load of which a stream failed, or was not finished before
its deadline, is no sample, and of ours a missed aim. A peer that leaves one unfinished is not asked again in that case,
and one that finished no stream at all in no larger one of that kind; after an unfinished load the next one waits until
all have come to rest. ``--quick`` asks the peers at 200 streams only, and makes paced streams and deadlines shorter.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.generator import Load, Outcome
from benchmarks.programs import ProgramFailed, Usage
from benchmarks.record import Aim, Case, none_of, ratio
from benchmarks.runner import Run, main
from benchmarks.streaming import Generator, System, generator, systems

INTERVAL_S: Final = 0.02
BURST_TOKENS: Final = 100
FEW, MANY = 200, 1000
_STEP: Final = 50
_TTFT_TOKENS: Final = 3
_REST_S: Final = 20.0
_REST_STEP_S: Final = 0.3
_KEPT: Final = "the bare endpoint keeps the pace"


@dataclass(frozen=True)
class Bench:
    """What all cases of one run share."""

    run: Run
    generator: Generator
    systems: Sequence[System]
    missing: dict[str, str]
    broken: dict[tuple[str, str], str] = field(default_factory=dict)
    """By kind of load and system: the case of which it finished no stream."""

    @property
    def deadline_s(self) -> float:
        return 4.0 if self.run.quick else 60.0

    @property
    def paced_tokens(self) -> int:
        return 50 if self.run.quick else 150

    def measure(self, case: str, unit: str, loads: dict[str, Load]) -> None:
        """Every system's load, in turn, ``rounds`` times."""
        left_out = self._left_out(case)
        for name, reason in (self.missing | left_out).items():
            self.run.case(case, name, unit).not_run = reason
        given_up = set(left_out)
        for _ in range(self.run.rounds):
            for system in self.systems:
                if system.name in given_up:
                    continue
                load = loads[system.name]
                with self.alone(system):
                    outcome, usage = self.generator.run(system, load)
                if not note(self.run.case(case, system.name, unit), load, outcome, usage):
                    given_up |= self._gave_up(case, system.name, whole=outcome.failed == load.streams)
                    settle(self.systems)
        self.run.aims.append(unbroken(self.run.case(case, "sllm", unit), self.run.least))

    @contextlib.contextmanager
    def alone(self, system: System) -> Iterator[None]:
        """The peers stand still but ``system``; ours and the bare endpoint, which LiteLLM asks, never do."""
        with contextlib.ExitStack() as others:
            for peer in self.systems[2:]:
                if peer is not system:
                    others.enter_context(peer.program.standing_still())
            yield

    def _left_out(self, case: str) -> dict[str, str]:
        """Peers that are not asked in this case, each with the reason."""
        if self.run.quick and case.endswith(("_n", "_1000")):
            return {system.name: "left out with --quick" for system in self.systems[2:]}
        kind = case.partition("_")[0]
        return {name: f"it finished no stream of {of}" for (which, name), of in self.broken.items() if which == kind}

    def _gave_up(self, case: str, name: str, *, whole: bool) -> set[str]:
        """Who is not asked again in this case."""
        self.run.note(f"{case}: {name} did not finish")
        if name in ("sllm", "bare"):
            return set()
        if whole:
            self.broken[case.partition("_")[0], name] = case
        return {name}


def note(case: Case, load: Load, outcome: Outcome, usage: Usage) -> bool:
    """Take one outcome into ``case``; whether the load was finished. Raises ``ProgramFailed`` for wrong tokens."""
    if outcome.wrong:
        raise ProgramFailed(f"{case.case}: {case.system} brought wrong tokens in {outcome.wrong} streams")
    finished = outcome.failed == 0
    if finished and outcome.ttft_ms and outcome.seconds:
        value = {
            "tokens/s": outcome.tokens / outcome.seconds,
            "ms": outcome.delay_p99_ms if load.interval else statistics.median(outcome.ttft_ms),
        }[case.unit]
        case.samples.append(round(value, 3))
    if not finished:
        case.notes = (
            f"{outcome.failed} of {load.streams} streams failed or were not finished after {load.deadline_s:.0f} s; "
            f"first: {' '.join(outcome.errors[0].split())[:160]}"
        )
    count = len(case.extra.setdefault("loads", []))
    case.cpu_s = round(((case.cpu_s or 0.0) * count + usage.cpu_s) / (count + 1), 3)
    case.peak_rss_mib = round(max(case.peak_rss_mib or 0.0, usage.pss_mib))
    case.extra["loads"].append(
        {
            "failed": outcome.failed,
            "ttft_p50_ms": round(statistics.median(outcome.ttft_ms), 3) if outcome.ttft_ms else None,
            "delay_p50_ms": round(outcome.delay_p50_ms, 3),
            "delay_p99_ms": round(outcome.delay_p99_ms, 3),
            "delay_max_ms": round(outcome.delay_max_ms, 3),
            "seconds": round(outcome.seconds, 3),
            "receives": outcome.receives,
            "generator_cpu_s": round(outcome.cpu_s, 3),
            "sent_late_ms": round(outcome.late_ms, 3),
        }
    )
    for key in ("ttft_p50_ms", "delay_p50_ms", "generator_cpu_s"):
        found = [each[key] for each in case.extra["loads"] if each[key] is not None]
        if found:
            case.extra[key] = statistics.median(found)
    return finished


def unbroken(case: Case, least: int) -> Aim:
    """That all streams of all loads came whole."""
    loads = case.extra.get("loads", [])
    return none_of(f"{case.case}: streams of {case.system} that failed", sum(load["failed"] for load in loads),
                   of=len(loads), least=least)  # fmt: skip


def settle(systems: Sequence[System]) -> None:
    """Until no system works any more: what was given up on may go on for a while. Bounded."""
    until = time.monotonic() + _REST_S
    used = [system.program.usage().cpu_s for system in systems]
    while time.monotonic() < until:
        time.sleep(_REST_STEP_S)
        before, used = used, [system.program.usage().cpu_s for system in systems]
        if max(now - then for now, then in zip(used, before, strict=True)) <= _REST_STEP_S / 5:
            return


def ttft(bench: Bench) -> None:
    """One stream at a time."""
    streams = 30 if bench.run.quick else 200
    loads = {
        system.name: system.load(streams, _TTFT_TOKENS, 0.0, spread_s=-1.0, deadline_s=bench.deadline_s)
        for system in bench.systems
    }
    bench.measure("ttft", "ms", loads)
    ours, bare = bench.run.case("ttft", "sllm").median, bench.run.case("ttft", "bare").median
    enough = len(bench.run.case("ttft", "sllm").samples) >= bench.run.least
    added = ours - bare if enough and ours is not None and bare is not None else None
    bench.run.aims.append(Aim("ttft: sllm - bare, ms (median)", added, at_most=1.0))


def burst(bench: Bench, name: str, streams: int) -> None:
    """All at once, as fast as they come."""
    case = f"burst_{name}"
    deadline_s = bench.deadline_s
    loads = {each.name: each.load(streams, BURST_TOKENS, 0.0, deadline_s=deadline_s) for each in bench.systems}
    bench.measure(case, "tokens/s", loads)
    run = bench.run
    ours = run.case(case, "sllm", "tokens/s")
    for other in (system.name for system in bench.systems if system.name != "sllm"):
        value = ratio(ours, run.case(case, other, "tokens/s"), least=run.least)
        run.aims.append(Aim(f"{case}: sllm / {other}, tokens/s", value, at_least=1.0))


def paced(bench: Bench, name: str, streams: int) -> None:
    """A token every 20 ms."""
    case, count = f"paced_{name}", bench.paced_tokens
    deadline_s = bench.deadline_s + 1 + count * INTERVAL_S
    loads = {
        each.name: each.load(streams, count, INTERVAL_S, spread_s=1.0, deadline_s=deadline_s) for each in bench.systems
    }
    bench.measure(case, "ms", loads)
    run = bench.run
    ours = run.case(case, "sllm")
    value = ratio(ours, run.case(case, "bare"), least=run.least)
    run.aims.append(Aim(f"{case}: sllm / bare, p99 token delay", value, at_most=2.0))
    if name == "n":  # there the bare endpoint keeps the pace
        delay = ours.median if len(ours.samples) >= run.least else None
        run.aims.append(Aim(f"{case}: sllm, p99 token delay, ms", delay, at_most=INTERVAL_S * 1e3))


def most_kept(bench: Bench) -> int:
    """The most streams, in steps of 50 up to 1000, at which the bare endpoint keeps the pace."""
    bare = next(system for system in bench.systems if system.name == "bare")

    def keeps(streams: int) -> bool:
        load = bare.load(streams, 50, INTERVAL_S, spread_s=1.0, deadline_s=bench.deadline_s + 2)
        with bench.alone(bare):
            outcome, _ = bench.generator.run(bare, load)
        return outcome.failed == 0 and outcome.delay_p99_ms <= INTERVAL_S * 1e3

    low, high = 1, MANY // _STEP + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle * _STEP) else (low, middle)
    return low * _STEP


CASES: Final = ("ttft", "burst_200", "burst_n", "burst_1000", "paced_200", "paced_n", "paced_1000")


def one(run: Run, bench: Bench, case: str) -> None:
    """Measure one case."""
    if case == "ttft":
        ttft(bench)
        return
    kind, _, name = case.partition("_")
    if name == "n" and "n" not in run.settings:
        run.settings["n"] = most_kept(bench)
        run.note(f"gateway: at {run.settings['n']} streams {_KEPT}")
    streams = run.settings["n"] if name == "n" else int(name)
    {"burst": burst, "paced": paced}[kind](bench, name, streams)


def measure_all(run: Run, cases: Sequence[str]) -> None:
    """Start everything once, then case by case."""
    with tempfile.TemporaryDirectory(prefix="bg-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with run.attempt("start"), generator(directory) as generating, systems(directory) as (ready, missing):
            bench = Bench(run, generating, ready, missing)
            for case in cases:
                with run.attempt(case, "tokens/s" if case.startswith("burst") else "ms"):
                    one(run, bench, case)


if __name__ == "__main__":
    sys.exit(main("gateway", CASES, measure_all))
