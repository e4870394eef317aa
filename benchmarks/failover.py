"""``python -m benchmarks.failover``: what a client sees when the leading controller is killed, or stopped (SIGSTOP).

Two controllers, one node. A caller calls functions of which nothing runs, one after the other: every answer takes an
acquire, which only the leading controller answers, and a start. A sample is the longest time without such an answer
around the fault, from the last one before it (``usual_ms``: where nothing happens), so there is a start in it. A call
that fails is no answer, and counted. The supervisor stands still meanwhile (SIGSTOP): a victim that is started again at
once is no loss, and how soon it is depends on how often it was of late. A stream of a ready function runs all the
while: ``streams_interrupted`` counts those that broke off, or lost, repeated or changed a value. A controller that was
stopped goes on before its supervisor does, which then starts it anew.

The other cases (``failover_streams``): a worker, a node, a gateway, the server that leads JetStream is killed under a
stream of the engine.
"""

from __future__ import annotations

import concurrent.futures
import http.client
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks import failover_streams
from benchmarks.chaos_faults import leader_of
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.record import Aim, Case, none_of
from benchmarks.runner import Run, main
from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.running import read_running
from sllm_runtime.protocol.timeline import SANDBOX

COUNTER: Final = ROOT / "functions" / "counter" / "function.py"
CASES: Final = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
GIVE_UP_S: Final = 30.0
BEFORE_S: Final = 1.0
WATCHED_S: Final = 4.0
"""From the fault on."""
FUNCTIONS: Final = 40
"""When it is a function's turn again, its instance has long been ended: nobody ends one while nobody leads."""
AGAIN_S: Final = 0.05
"""Between a call that failed and the next one."""
COUNT: Final = 200
INTERVAL_S: Final = 0.03


@dataclass
class Calls:
    """The caller's: when each answer that took a start came, by ``time.monotonic``. ``failed``: why calls did."""

    answers: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def longest(self, fault: float) -> float:
        """Seconds between two answers, of those of which the later one came after the fault; without one until the
        caller gave up."""
        gaps = [after - before for before, after in itertools.pairwise(self.answers) if after > fault]
        return max(gaps, default=GIVE_UP_S)

    def usual(self, fault: float) -> list[float]:
        """Seconds between two answers before the fault."""
        return [after - before for before, after in itertools.pairwise(self.answers) if after <= fault]


def measure(run: Run, cases: Sequence[str]) -> None:
    """Faults in turn."""
    with tempfile.TemporaryDirectory(prefix="bf-", ignore_cleanup_errors=True) as name:
        if controllers := [case for case in cases if case in CASES]:
            with run.attempt("controllers"), Platform(Path(name) / "p", {"SLLM_CONTROLLERS": "2"}) as platform:
                platform.deploy(COUNTER, keep_alive=600.0)
                cold = [platform.deploy(COUNTER, name=f"cold-{n}", keep_alive=0.0) for n in range(FUNCTIONS)]
                for case in controllers:
                    with run.attempt(case):
                        _faults(run, platform, case, cold)
        failover_streams.measure(run, Path(name), cases)


def _faults(run: Run, platform: Platform, case: str, cold: Sequence[str]) -> None:
    found, broken, failed, usual = run.case(case, "sllm"), 0, list[str](), list[float]()
    try:
        for _ in range(run.rounds if run.quick else 20):
            _settle(platform)
            with run.spending(platform.program.usage, found), concurrent.futures.ThreadPoolExecutor(2) as pool:
                stop = threading.Event()
                stream, caller = pool.submit(_streamed, platform), pool.submit(_call_on, platform, cold, stop)
                try:
                    time.sleep(BEFORE_S)
                    fault = _fault(platform, CASES[case])
                finally:
                    stop.set()
                calls = caller.result()
                broken += not stream.result()
            found.samples.append(round(calls.longest(fault) * 1e3, 1))
            failed += calls.failed
            usual += calls.usual(fault)
    finally:
        judge(run, found, broken, failed)
    if usual:
        found.extra["usual_ms"] = round(statistics.median(usual) * 1e3, 1)


def judge(run: Run, found: Case, broken: int, failed: Sequence[str]) -> None:
    """The aims of a case."""
    found.extra |= {"streams_interrupted": broken, "calls_failed": len(failed)}
    if failed:
        found.notes = f"the first call that failed: {failed[0]}"
    longest = max(found.samples) if len(found.samples) >= run.least else None
    run.aims.append(Aim(f"{found.case}: longest interruption of acquire, ms", longest, at_most=3000.0))
    for what, count in {"streams interrupted": broken, "calls failed": len(failed)}.items():
        run.aims.append(none_of(f"{found.case}: {what}", count, of=len(found.samples), least=run.least))


def _streamed(platform: Platform) -> bool:
    """Whether a stream of the ready function came whole."""
    try:
        answer = platform.stream("counter", {"to": COUNT, "interval": INTERVAL_S})
    except (ProgramFailed, OSError, http.client.HTTPException):
        return False
    return answer.values == tuple(range(1, COUNT + 1))


def _call_on(platform: Platform, names: Sequence[str], stop: threading.Event) -> Calls:
    """One call after the other, until ``stop``."""
    calls = Calls()
    for name in itertools.cycle(names):
        if stop.is_set():
            return calls
        try:
            answer = platform.stream(name, {"to": 1, "interval": 0.0})
        except (ProgramFailed, OSError, http.client.HTTPException) as error:
            calls.failed.append(f"{type(error).__name__}: {error}"[:300])
            stop.wait(AGAIN_S)
            continue
        if any(span.name == SANDBOX for span in answer.spans):
            calls.answers.append(time.monotonic())
    raise AssertionError("a cycle has no end")


def _settle(platform: Platform) -> None:
    """Until both controllers have run for a while: one that has just come is no standby yet."""
    until = time.monotonic() + GIVE_UP_S
    while len(_controllers(platform)) < 2:
        if time.monotonic() > until:
            raise ProgramFailed("a controller was not started again")
        time.sleep(0.05)
    time.sleep(3.0)


def _controllers(platform: Platform) -> dict[str, int]:
    running = read_running(platform.data)
    pids = running.pids if running is not None else {}
    return {name: pid for name, pid in pids.items() if name.startswith("controller") and start_time(pid)}


def _fault(platform: Platform, number: signal.Signals) -> float:
    """Strike the leader, and wait until what follows is over: when it was struck."""
    leader = leader_of(platform)
    if (pid := _controllers(platform).get(leader)) is None:
        raise ProgramFailed(f"{leader}, which led, has ended by itself")
    with platform.program.starting_nothing():
        at = time.monotonic()
        os.kill(pid, number)
        time.sleep(WATCHED_S)
        if number is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
    return at


if __name__ == "__main__":
    sys.exit(main("failover", (*CASES, *failover_streams.STREAMS), measure))
