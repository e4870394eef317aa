"""``python -m benchmarks.estimator``: what starts were expected to take beside what they took.

Real starts on the real platform. Functions with synthetic models of three sizes are called when nothing of them runs,
in turn; the controller tells of each start what it expected and what it took, by its own clock (the fields of event
``instance.ready``). ``dram``: the weights are in the node's memory; ``ssd``: the loader was told to drop them and no
page of them is cached. ``contended``: all three at once from the SSD, so that they wait for each other on the disk. The
first round of each case teaches and is not counted. ``held_out``: the first start from the SSD of functions that are
deployed for it, on whose path nothing was measured; only what others took tells. ``ssd_steady``, ``contended_steady``:
as without, but the kernel gives loaderd 600 MB/s of the disk (``steady_disk``), since the disk of a virtual machine has
another speed every few minutes. Samples are errors: how far what was expected is from what it took. Beside each
``constant``, the mean of all earlier starts of the case, and ``spread``: how far equal starts (of one size, in one
case) are from their own median, which nobody knows before. That is this machine's noise, under which no expectation
gets; ``extra`` says which stages it is of. The worst start is named with the stage that was furthest from what it takes
else. A full run takes 25 minutes, a quick one three.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import cold_gigabyte, page_cache, steady_disk, synthetic
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, percentile
from benchmarks.runner import Run, main
from sllm_loaderd.client import LoaderControl
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.timeline import START_STAGES, Span

STEADY: Final = "_steady"
CASES: Final = ("dram", "ssd", "contended", "held_out", f"ssd{STEADY}", f"contended{STEADY}")
STEADY_BYTES_S: Final = 600 * 10**6
"""Less than a disk has at any time that its others leave it."""
MIB: Final = 2**20
SEEN_S: Final = 60.0
PARTITION: Final = "partition_0.bin"
LIMITS: Final = {case: (5.0, 0.03) if case == "dram" else (15.0, 0.04) for case in CASES}
"""Milliseconds and share of the start that 95 of 100 errors may have, whichever is more."""


@dataclass(frozen=True)
class Start:
    """One start, in ms. ``tier``: where the weights were expected to come from."""

    function: str
    tier: str
    expected: float
    took: float
    stages: Mapping[str, float] = field(default_factory=dict)
    """What its stages took, and ``rest``: what lies around them."""

    @property
    def error(self) -> float:
        return abs(self.expected - self.took)

    @property
    def size(self) -> str:
        """Equal starts are those of models of one size."""
        return self.function.partition("-")[0]


def measure(run: Run, cases: Sequence[str]) -> None:
    """The cases share one platform: what one has taught the next one knows."""
    sizes = (32, 64, 128) if run.quick else (64, 192, 512)
    run.settings["model_mib"] = list(sizes)
    with tempfile.TemporaryDirectory(prefix="be-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        with Platform(directory / "platform", {"SLLM_POOL_SIZE": str(len(sizes))}) as platform:
            names = [_deployed(platform, directory, size) for size in sizes]
            for case in cases:
                with run.attempt(case):
                    if case == "held_out":
                        _held_out(run, platform, directory, sizes)
                    elif case.endswith(STEADY):
                        _steady(run, platform, case, names)
                    else:
                        _case(run, platform, case, names)


def _deployed(platform: Platform, directory: Path, mib: int, number: int = 0) -> str:
    name = f"m{mib}-{number}" if number else f"m{mib}"
    home = directory / name
    synthetic.write(home / "model", mib * MIB, cold_gigabyte.STEP, seed=mib + 1000 * number)
    # One module of a name for an interpreter.
    file = shutil.copy(cold_gigabyte.FUNCTION, home / f"estimated{mib}_{number}.py")
    return platform.deploy(Path(file), name=name, memory=512 * MIB)


def _held_out(run: Run, platform: Platform, directory: Path, sizes: Sequence[int]) -> None:
    """One start each: the next one of the same function would be expected by this one."""
    starts = []
    for number in range(1, 3 if run.quick else 9):
        for mib in sizes:
            name = _deployed(platform, directory, mib, number)
            _forget(platform, "held_out", [name])
            starts.append(_start(platform, name))
    tell(run, "held_out", starts)


def _steady(run: Run, platform: Platform, case: str, names: Sequence[str]) -> None:
    if reason := steady_disk.missing(platform.data):
        run.case(case, "sllm").not_run = reason
        return
    loader = platform.process("sllm-loaderd").pid
    with steady_disk.throttled(loader, platform.data, STEADY_BYTES_S):
        _case(run, platform, case, names)


def _case(run: Run, platform: Platform, case: str, names: Sequence[str]) -> None:
    rounds = 4 if run.quick else 70  # of three starts each
    starts: list[Start] = []
    for number in range(rounds + 1):
        if case.startswith("contended"):
            _forget(platform, case, names)
            with ThreadPoolExecutor(len(names)) as callers:
                found = list(callers.map(lambda name: _start(platform, name), names))
        else:
            found = []
            for name in names:
                _forget(platform, case, names)
                found.append(_start(platform, name))
        starts += found if number else []
    tell(run, case, starts)


def tell(run: Run, case: str, starts: Sequence[Start]) -> None:
    """The errors of a case's starts, and whether the aim is met."""
    ours, constant = run.case(case, "sllm"), run.case(case, "constant")
    ours.samples += [round(start.error, 3) for start in starts]
    for number, start in enumerate(starts[1:], 1):
        mean = statistics.fmean(earlier.took for earlier in starts[:number])
        constant.samples.append(round(abs(mean - start.took), 3))
    spread = run.case(case, "spread")
    spread.samples += [round(far, 3) for far in spreads(starts, lambda start: start.took)]
    for stage in starts[0].stages:
        far = spreads(starts, partial(_stage, stage))
        spread.extra[f"{stage}_p95_ms"] = round(percentile(far, 95), 3)
    for each in (ours, constant, spread):
        each.extra["p95_ms"] = round(percentile(each.samples, 95), 3)
    worst = max(starts, key=lambda start: start.error)
    ours.extra["took_ms"] = round(statistics.median(start.took for start in starts), 1)
    ours.notes = (
        f"worst: {worst.function} from {worst.tier}, {worst.expected:.0f} ms expected, {worst.took:.0f} ms taken"
        f"{cause(worst, starts)}"
    )
    least, share = LIMITS[case]
    excess = percentile([start.error / max(least, share * start.took) for start in starts], 95)
    enough = len(starts) >= 200
    aim = f"{case}: p95 of error / max({least:g} ms, {share:.0%} of the start)"
    run.aims.append(Aim(aim, round(excess, 3) if enough else None, at_most=1.0))


def spreads(starts: Sequence[Start], of: Callable[[Start], float]) -> list[float]:
    """How far each is from the median of its equals."""
    alike: dict[str, list[float]] = {}
    for start in starts:
        alike.setdefault(start.size, []).append(of(start))
    middle = {size: statistics.median(values) for size, values in alike.items()}
    return [abs(of(start) - middle[start.size]) for start in starts]


def _stage(name: str, start: Start) -> float:
    return start.stages.get(name, 0.0)


def cause(worst: Start, starts: Sequence[Start]) -> str:
    """The stage of ``worst`` that was furthest from what it takes in equal starts, in words."""
    alike = [start.stages for start in starts if start.size == worst.size]
    usual = {stage: statistics.median(each.get(stage, 0.0) for each in alike) for stage in worst.stages}
    if not usual:
        return ""
    stage = max(usual, key=lambda name: abs(worst.stages[name] - usual[name]))
    return f"; {stage} took {worst.stages[stage]:.0f} ms, as a rule {usual[stage]:.0f}"


def _stages(spans: Sequence[Span], took: float) -> dict[str, float]:
    own = [span for span in spans if span.name in START_STAGES]
    covered = max(span.at + span.ms for span in own) - min(span.at for span in own) if own else 0.0
    return {**{span.name: span.ms for span in own}, "rest": took - covered}


def _start(platform: Platform, name: str) -> Start:
    """Call it; what its start was expected to take, and took."""
    answer = platform.stream(name, {})
    found = None
    for event in platform.client.events("GET", f"{API}/events", params={"function": name, "limit": "50"}):
        if event.event == "event":
            said = json.loads(event.data)
            found = said["fields"] if said["kind"] == "instance.ready" else found
    if not found:
        raise ProgramFailed(f"{name}: the controller did not tell what its start took")
    took = float(found["took_s"]) * 1e3
    return Start(name, found["tier"], float(found["expected_s"]) * 1e3, took, _stages(answer.spans, took))


def _forget(platform: Platform, case: str, names: Sequence[str]) -> None:
    """No instance; but for ``dram`` nothing of the models in memory either."""
    platform.until_cold(*names)
    if case == "dram":
        return
    asyncio.run(_evict(platform))
    for folder, _, files in os.walk(platform.data):  # which passes over a sandbox's directory that goes meanwhile
        if PARTITION in files:
            page_cache.drop(Path(folder, PARTITION))
    until = time.monotonic() + SEEN_S
    while any("dram" in tiers for tiers in platform.client.request("GET", f"{API}/nodes/n1")["tiers"].values()):
        if time.monotonic() > until:
            raise ProgramFailed(f"the controller does not see after {SEEN_S:g} s that the models have left the memory")
        time.sleep(0.05)


async def _evict(platform: Platform) -> None:
    async with LoaderControl(platform.loader_socket()) as loader:
        for digest in await loader.models():
            await loader.evict(digest)


if __name__ == "__main__":
    sys.exit(main("estimator", CASES, measure))
