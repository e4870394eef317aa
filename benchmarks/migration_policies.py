"""The case of ``migration`` after figure 3 of ServerlessLLM: two servers, two models, four policies.

Server n2 has model B in its memory and runs A; server n1 has A in its memory and is idle, B it would have to read from
a store that gives it in five seconds. Each server has room for one instance. Somebody calls B, which has the
higher priority: else an instance that was stopped for it might be started again in its place.
``availability`` starts B on n1, from the store; ``locality`` waits on n2 until the call of A has ended; ``preemption``
stops A on n2, whose call goes on at n1 from its tokens; ``startup-time`` lets it go on there while it runs.
``figure3_started``: from B's call to its first token; ``figure3_running``: the longest gap in A's stream from then on.
A is the demo model, B random bytes, of which the first token is a digest. Both answers are compared. A platform for
each sample, since whoever was called is in memory afterwards; their instances of A are old enough to be moved.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks import cold_gigabyte, synthetic
from benchmarks.cold_cases import CODER
from benchmarks.heard import Heard, Sums, understand
from benchmarks.migration_load import Called, counted, receive
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, Program, ProgramFailed
from benchmarks.record import none_of
from benchmarks.runner import Run, in_turn
from sllm_loaderd.convert.directory import convert_directory
from sllm_runtime.control.scheduling.moving import SETTLED_S
from sllm_runtime.protocol.http import API

POLICIES: Final = ("availability", "locality", "preemption", "startup-time")
STORE_S: Final = 5.0
"""That the store takes for B: what a server's disk takes for a large model."""
MIB: Final = 2**20
ASK: Final = {"prompt": "class Parser", "temperature": 0.8, "seed": 7}
AT: Final = 300
"""Pieces of A's stream, of an event or more, that are here when B is called."""
QUICKLY_S: Final = 5.0
"""In place of SETTLED_S, in a quick run."""
WAIT_S: Final = 60.0
KEEP_S: Final = 600.0
ONE_EACH: Final = {"SLLM_CPU": "1", "SLLM_CPU_OVERCOMMIT": "1", "SLLM_SSD_BYTES": "0", "SLLM_PRELOAD": "engine"}
"""Room for one instance; no copy of B on a disk."""


@dataclass(frozen=True)
class Models:
    """What all platforms share. ``store``: B's address; ``digest``: its token; ``function``: B's file."""

    store: str
    digest: str
    function: Path


def measure(run: Run, case: str, directory: Path) -> None:
    """Each policy in turn. Those of one round stand side by side while their instances of A become old enough."""
    nbytes = (256 if run.quick else 512) * MIB
    run.settings.update({f"{case}_store_s": STORE_S, f"{case}_bytes": nbytes})
    total = Sums()
    tokens = 1000 if run.quick else 1500
    try:
        with _models(directory, nbytes) as models:
            for number in range(1 if run.quick else run.rounds):
                _round(run, case, number, directory / f"{number}", models, tokens, total)
    finally:
        wrong = {
            "tokens of the running call lost, repeated or changed": total.wrong,
            "running calls broken off": total.broken,
        }
        for what, count in wrong.items():
            run.aims.append(none_of(f"{case}: {what}", count, of=total.streams, least=run.least * len(POLICIES)))


def _round(run: Run, case: str, number: int, directory: Path, models: Models, tokens: int, total: Sums) -> None:
    settled_s = QUICKLY_S if run.quick else SETTLED_S
    with contextlib.ExitStack() as stack:
        scenes = {
            policy: stack.enter_context(_scene(policy, directory / policy, models, tokens, settled_s))
            for policy in in_turn(POLICIES, number)
        }
        for policy, scene in scenes.items():
            _strike(run, case, policy, scene, total)


@contextlib.contextmanager
def _models(directory: Path, nbytes: int) -> Iterator[Models]:
    made = synthetic.write(directory / "plain", nbytes, cold_gigabyte.STEP)
    convert_directory(made.directory, directory / "store" / "b")
    shutil.rmtree(made.directory)
    code = directory / "code"  # alone there: what lies beside a function goes with it
    code.mkdir()
    # One module of a name for an interpreter.
    function = Path(shutil.copy(cold_gigabyte.FUNCTION, code / "started.py"))
    argv = [sys.executable, "-m", "benchmarks.slow_store", str(directory / "store"), str(nbytes / STORE_S)]
    with Program(argv, directory / "store.log", cwd=ROOT) as store:
        yield Models(f"http://127.0.0.1:{store.hear(WAIT_S)['port']}/b", str(made.sampled), function)


@dataclass(frozen=True)
class Scene:
    """A platform as the figure begins. ``settled``: when A's instance may be moved, by ``time.monotonic``."""

    models: Models
    running: Called
    right: Sequence[Sequence[Any]]
    started: str
    settled: float


@contextlib.contextmanager
def _scene(policy: str, directory: Path, models: Models, tokens: int, settled_s: float) -> Iterator[Scene]:
    with Platform(directory, {**ONE_EACH, "SLLM_POLICY": policy, "SLLM_SETTLED": str(settled_s)}, nodes=2) as platform:
        _wish(platform, "n2", "cordon")
        running = platform.deploy(CODER, keep_alive=KEEP_S, max_instances=2)
        until = time.monotonic() + WAIT_S
        while _wish(platform, "n1", "drain")["instances"]:  # its weights stay in memory there
            if time.monotonic() > until:
                raise ProgramFailed(f"n1 is not drained within {WAIT_S:g} s")
            time.sleep(0.05)
        _wish(platform, "n2", "uncordon")
        started = platform.deploy(models.function, model=models.store, keep_alive=0.0, priority=1)
        platform.until_cold(started)
        called = Called(platform, running, [{**ASK, "max_tokens": tokens}])
        right = called.right()
        _wish(platform, "n1", "uncordon")
        yield Scene(models, called, right, started, time.monotonic() + settled_s + 1.0)


def _wish(platform: Platform, node: str, wish: str) -> dict[str, Any]:
    said: dict[str, Any] = platform.client.request("POST", f"{API}/nodes/{node}/{wish}")
    return said


def _strike(run: Run, case: str, policy: str, scene: Scene, total: Sums) -> None:
    """B is called while A runs."""
    time.sleep(max(0.0, scene.settled - time.monotonic()))
    heard, platform = Heard(0), scene.running.platform
    first, gap = run.case(f"{case}_started", policy), run.case(f"{case}_running", policy)
    with run.spending(platform.program.usage, first, gap), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(receive, scene.running, heard)
        while len(heard.arrived) < AT:
            if reading.done():
                raise ProgramFailed(f"the running call has ended after {len(heard.arrived)} pieces")
            time.sleep(0.005)
        struck = time.monotonic()
        answer = platform.stream(scene.started, {})
        reading.result()
    understand(heard)
    total.add(heard, scene.right[0])
    if answer.text != scene.models.digest:
        raise ProgramFailed(f"{scene.started} says {answer.text}, of what was written it is {scene.models.digest}")
    gaps = [after - before for before, after in itertools.pairwise(heard.times) if after > struck]
    if not gaps:
        raise ProgramFailed("the running call had ended when the other one was called")
    first.samples.append(round(answer.first_ms, 1))
    gap.samples.append(round(max(gaps) * 1e3, 1))
    for what in ("moved", "resumed"):
        gap.extra[what] = gap.extra.get(what, 0) + counted(platform, what)
    totals = gap.extra.setdefault("totals_s", [])
    totals.append(round(heard.times[-1] - heard.times[0], 3))
    gap.extra["total_s"] = round(statistics.median(totals), 3)
