"""``python -m benchmarks.estimator``: what starts were expected to take beside what they took.

Real starts on the real platform. Functions with synthetic models of three sizes are called when nothing of them runs,
in turn; the controller tells of each start what it expected and what it took, by its own clock (the fields of event
``instance.ready``). ``dram``: the weights are in the node's memory; ``ssd``: the loader was told to drop them and no
page of them is cached. ``contended``: all three at once from the SSD, so that they wait for each other on the disk. The
first round of each case teaches and is not counted. ``held_out_ssd``, ``held_out_dram``: starts on nodes on which none
was before (``estimator_held_out``). ``ssd_steady``, ``contended_steady``: as without, but the kernel gives loaderd 600
MB/s of the disk (``throttle``), since the disk of a virtual machine has another speed every few minutes; it does so in
slices of 0.1 s, so the models of these are of many such slices. Samples are errors: how far what was expected is from
what it took. Beside each ``constant``, the mean of all earlier starts of the same function in the case; where it is as
good, or nearly, the notes say so. And ``spread``: how far equal starts (of one size, in one case) are from their own
median, which nobody knows before. That is this machine's noise, under which no expectation gets; ``extra`` says which
stages it is of. The worst start is named with the term of what was expected that was furthest from what it took. A full
run takes 40 minutes, a quick one three: ``--only`` makes records of a quarter of an hour.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from benchmarks import estimator_held_out
from benchmarks.estimator_starts import DRAM, SSD, Start, begin, deployed, forget, tell
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.runner import Run, main
from benchmarks.throttle import device_of, limiter, throttled

STEADY: Final = "_steady"
KNOWN: Final = ("dram", "ssd", "contended", f"ssd{STEADY}", f"contended{STEADY}")
CASES: Final = (*KNOWN, *estimator_held_out.TIERS)
STEADY_BYTES_S: Final = 600 * 10**6
"""Less than a disk has at any time that its others leave it."""
STEADY_MIB: Final = (256, 768, 2048)
"""Of the models there. With one of 64 MiB it is the order of slices that is measured: it is read within one."""


def measure(run: Run, cases: Sequence[str]) -> None:
    """The cases of known paths share one platform: what one has taught the next one knows."""
    sizes = (32, 64, 128) if run.quick else (64, 192, 512)
    run.settings["model_mib"] = list(sizes)
    with tempfile.TemporaryDirectory(prefix="be-", ignore_cleanup_errors=True) as name:
        directory = Path(name)
        if known := [case for case in cases if case in KNOWN and not case.endswith(STEADY)]:
            with run.attempt("known paths"):
                _known(run, directory / "known", sizes, known)
        if steady := [case for case in cases if case.endswith(STEADY)]:
            larger = sizes if run.quick else STEADY_MIB
            run.settings["steady_model_mib"] = list(larger)
            with run.attempt("paths of one speed"):
                _known(run, directory / "steady", larger, steady)
        if held_out := [case for case in cases if case in estimator_held_out.TIERS]:
            with run.attempt("held-out paths"):
                estimator_held_out.measure(run, directory / "held", sizes, held_out)


def _known(run: Run, directory: Path, sizes: Sequence[int], cases: Sequence[str]) -> None:
    with Platform(directory / "platform", {"SLLM_POOL_SIZE": str(len(sizes))}) as platform:
        names = [deployed(platform, directory, size) for size in sizes]
        for case in cases:
            with run.attempt(case):
                if case.endswith(STEADY):
                    _steady(run, platform, case, names)
                else:
                    _case(run, platform, case, names)


def _steady(run: Run, platform: Platform, case: str, names: Sequence[str]) -> None:
    try:
        limiter()
        device_of(platform.data)
    except ProgramFailed as reason:
        run.case(case, "sllm").not_run = str(reason)
        return
    loader = platform.process("sllm-loaderd").pid
    with throttled(platform.data, STEADY_BYTES_S, [loader], own=False):
        _case(run, platform, case, names)


def _case(run: Run, platform: Platform, case: str, names: Sequence[str]) -> None:
    rounds = 3 if run.quick else 70  # of three starts each
    starts: list[Start] = []
    with run.spending(platform.program.usage, run.case(case, "sllm")):
        for number in range(rounds + 1):
            found = _round(platform, case, names)
            starts += found if number else []
    tell(run, case, starts, DRAM if case == "dram" else SSD)


def _round(platform: Platform, case: str, names: Sequence[str]) -> list[Start]:
    if case.startswith("contended"):
        forget(platform, names, dram=False)
        with ThreadPoolExecutor(len(names)) as callers:
            return list(callers.map(lambda name: begin(platform, name), names))
    found = []
    for name in names:
        forget(platform, names, dram=case == "dram")
        found.append(begin(platform, name))
    return found


if __name__ == "__main__":
    sys.exit(main("estimator", CASES, measure))
