"""``python -m benchmarks.failover``: what a client sees when the leading controller is killed, or stopped (SIGSTOP).

Two controllers, one node. A client asks for a function's description every 10 ms, which only the leading controller
answers: a sample is the longest time between two answers around the fault, from the last one before it. A stream of a
ready function runs all the while: ``streams_interrupted`` counts those that lost, repeated or changed a value. A
controller that was stopped goes on when the next one answers; its supervisor then starts it anew.

The other cases (``failover_streams``): a worker, a node, a gateway, the server that leads JetStream is killed under a
stream of the engine.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks import failover_streams
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed
from benchmarks.record import Aim, percentile
from benchmarks.runner import Run, main
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.local import Layout
from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.running import read_running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.records import Term
from sllm_runtime.protocol.subjects import TERM_KEY

CASES: Final = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
ASK_S: Final = 0.01
GIVE_UP_S: Final = 30.0
WATCHED_S: Final = 4.0
"""From the fault on."""
COUNT: Final = 200
INTERVAL_S: Final = 0.03


def measure(run: Run, cases: Sequence[str]) -> None:
    """Faults in turn."""
    with tempfile.TemporaryDirectory(prefix="bf-", ignore_cleanup_errors=True) as name:
        if controllers := [case for case in cases if case in CASES]:
            with Platform(Path(name) / "p", {"SLLM_CONTROLLERS": "2"}) as platform:
                platform.deploy(ROOT / "functions" / "counter" / "function.py", keep_alive=600.0)
                for case in controllers:
                    with run.attempt(case):
                        _faults(run, platform, case)
        failover_streams.measure(run, Path(name), cases)


def _faults(run: Run, platform: Platform, case: str) -> None:
    found, broken = run.case(case, "sllm"), 0
    for _ in range(run.rounds if run.quick else 20):
        _settle(platform)
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            stream = pool.submit(platform.stream, "counter", {"to": COUNT, "interval": INTERVAL_S})
            found.samples.append(round(_fault(platform, CASES[case]) * 1e3, 1))
            broken += stream.result(GIVE_UP_S).values != tuple(range(1, COUNT + 1))
    found.extra |= {"streams_interrupted": broken, "p99_ms": percentile(found.samples, 99)}
    longest = max(found.samples) if len(found.samples) >= run.least else None
    run.aims.append(Aim(f"{case}: longest interruption, ms", longest, at_most=3000.0))
    run.aims.append(Aim(f"{case}: streams interrupted", float(broken), at_most=0.0))


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
    """Strike the leader: the longest time between two answers around it, in seconds."""
    pid = _controllers(platform)[asyncio.run(_leader(platform))]
    last, longest = _answered(platform), 0.0
    os.kill(pid, number)
    until = time.monotonic() + WATCHED_S
    while time.monotonic() < until:
        now = _answered(platform)
        longest, last = max(longest, now - last), now
        time.sleep(ASK_S)
    if number is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    return longest


async def _leader(platform: Platform) -> str:
    """The controller that leads, by the store."""
    running = read_running(platform.data)
    if running is None:
        raise ProgramFailed("the platform has ended")
    identity = str(Layout(platform.data).identity_file("g1"))
    settings = Settings.load({"SLLM_NATS_URL": running.nats_url, "SLLM_IDENTITY_FILE": identity})
    bus = await Bus.connect(settings, "g1", name="benchmark")
    try:
        term = await (await StateStore.open(bus, create=False)).get(TERM_KEY, Term)
    finally:
        await bus.close()
    if term is None:
        raise ProgramFailed("no controller was ever elected")
    return term.controller


def _answered(platform: Platform) -> float:
    """When the controller next answers."""
    until = time.monotonic() + GIVE_UP_S
    while True:
        try:
            platform.function("counter")
            return time.monotonic()
        except SllmError:
            if time.monotonic() > until:
                raise
            time.sleep(ASK_S)


if __name__ == "__main__":
    sys.exit(main("failover", (*CASES, *failover_streams.STREAMS), measure))
