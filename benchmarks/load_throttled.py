"""The case of ``load`` on a slow disk: SATA-like, by the kernel's limit on what is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from benchmarks.load_bench import Bench
from benchmarks.load_model import QUICK
from benchmarks.load_reference import limits
from benchmarks.load_ssd import LOADED, cold, near
from benchmarks.load_systems import Peer
from benchmarks.programs import ProgramFailed
from benchmarks.record import against_limit
from benchmarks.runner import Run
from benchmarks.throttle import device_of, limiter, throttled

RATE: Final = 500_000_000
"""Bytes a second, as a SATA SSD reads."""
SHARE_AIM: Final = 0.95


def measure(bench: Bench, case: str, peers: Sequence[Peer], *, like: str) -> None:
    """As a cold load, with all that the benchmark starts under the limit."""
    run = bench.run
    try:
        found, device = limiter(), device_of(bench.directory)
    except ProgramFailed as error:
        run.case(case, "sllm", "s").not_run = str(error)
        return
    checkpoint, chosen = bench.checkpoint(case, QUICK), near(run, case, peers, like)
    bench.forms(checkpoint, chosen)  # what is only prepared has the whole disk
    bench.converted(checkpoint)
    run.settings[f"{case}_limit"] = f"{RATE / 1e6:.0f} MB/s of {device} by {found.file}"
    with throttled(bench.directory, RATE, bench.programs.pids):
        cold(bench, case, QUICK, chosen, primed=False, judge=share)


def share(run: Run, case: str, _nbytes: int) -> None:
    """Beside who reads fastest of what the kernel lets all read: it lets a burst through beyond the limit as set, so
    that one is beaten. Peers stand beside it and are no aim: all that is fast enough takes as long as the limit does.
    """
    known = [run.case(case, system, "s") for system in limits()]
    run.aims.append(against_limit(case, known, run.case(case, LOADED, "s"), at_least=SHARE_AIM, least=run.least))
