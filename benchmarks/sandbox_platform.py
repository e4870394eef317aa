"""The cases of ``sandbox`` that need a platform whose functions run in containers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from benchmarks import sandbox_relay, synthetic
from benchmarks.cold_cases import CODER, Check, Stages, cold_call, until_quiet
from benchmarks.cold_gigabyte import FUNCTION, STEP
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed, Usage, usage
from benchmarks.record import Aim, Case, mean_with, ratio
from benchmarks.runner import Run, in_turn
from benchmarks.sandbox_worker import copied
from sllm_invoker.containers import probe
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.base import Base
from sllm_invoker.images.store import Store
from sllm_loaderd.chunk import MEMFD_NAME
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.http import API

CASES: Final = ("demo", "relay", "memory")
INSTANCES: Final = 10
NBYTES: Final = 10**9
_FEW: Final = 2**28
_GB: Final = 1e9
_MIB: Final = 2**20
_GONE_S: Final = 60.0


def measure(run: Run, directory: Path, cases: Sequence[str]) -> None:
    """On one platform, with the first engine that works here."""
    work: dict[str, Callable[[Platform, Engine], None]] = {
        "demo": lambda platform, _engine: demo(run, platform, directory),
        "relay": lambda platform, engine: sandbox_relay.measure(run, platform, engine, directory),
        "memory": lambda platform, _engine: memory(run, platform, directory),
    }
    try:
        engine = asyncio.run(probe.find())
    except Unavailable as error:
        for case in cases:
            run.case(case, "sllm").not_run = error.message
        return
    run.settings["engine"] = " ".join(engine.words)
    with run.attempt("a platform of containers"), _isolated(run, engine, directory) as platform:
        for case in cases:
            with run.attempt(case):
                work[case](platform, engine)


@contextlib.contextmanager
def _isolated(run: Run, engine: Engine, directory: Path) -> Iterator[Platform]:
    image = asyncio.run(Base(Store(engine), directory / "image", dict(os.environ)).ensure(run.note))
    isolated = {
        "SLLM_SANDBOX": engine.kind,
        "SLLM_REQUIRE_ISOLATION": "true",
        "SLLM_IMAGE": image,
    }
    with Platform(directory / "containers", isolated) as platform:
        yield platform


def demo(run: Run, inside: Platform, directory: Path) -> None:
    """The demo's function from nothing, in a container and in a process in turn."""
    check = Check()
    with Platform(directory / "processes") as outside:
        both = (("process", outside, Stages()), ("sllm", inside, Stages()))
        for _, platform, _ in both:
            platform.deploy(CODER, keep_alive=0.0)
        until_quiet(outside)
        for number in range(run.rounds):
            for system, platform, stages in in_turn(both, number):
                cold_call(platform, run.case("demo", system), stages, check)
        for system, _, stages in both:
            stages.into(run.case("demo", system))
    value = ratio(run.case("demo", "sllm"), run.case("demo", "process"), least=run.least)
    run.aims.append(Aim("demo: first token from a warm container / from a warm process", value, at_most=1.15))


def memory(run: Run, platform: Platform, directory: Path) -> None:
    """Ten functions with one model, each of which has read every byte of it; others in each round."""
    file = copied(FUNCTION, directory, "large")
    model = synthetic.write(file.with_name("model"), _FEW if run.quick else NBYTES, STEP)
    case = run.case("memory", "sllm", "GB")
    case.notes = f"weights as {INSTANCES} instances and loaderd share them"
    case.extra["model_gb"] = round(model.nbytes / _GB, 4)
    for number in range(run.rounds):
        run.note(f"memory: round {number + 1} of {run.rounds}")
        names = [f"large-{number}-{each}" for each in range(INSTANCES)]
        before = platform.program.usage().cpu_s
        for name in names:
            platform.deploy(file, name=name, keep_alive=600.0, memory=_FEW)
            text = platform.stream(name, {"every": True}).text
            if text != str(model.whole):
                raise ProgramFailed(f"{name} read other bytes: digest {text}, written were {model.whole}")
        instances = {each["instance"] for name in names for each in platform.function(name)["instances"]}
        _shared(platform, case, instances, before)
        for name in names:
            platform.client.request("DELETE", f"{API}/functions/{name}", params={"force": "true"})
        _until_gone(instances)
    value = case.median if len(case.samples) >= run.least else None
    run.aims.append(Aim("memory: weights of ten instances of a model of 1 GB, GB", value, at_most=1.1))


def _shared(platform: Platform, case: Case, instances: set[str], before: float) -> None:
    """One sample: what they have together."""
    workers = dict(_workers(instances))
    if len(workers) != INSTANCES:
        raise ProgramFailed(f"{len(workers)} of {INSTANCES} instances run: {sorted(workers)}")
    weights = [pss(process.pid) for process in workers.values()]
    theirs = frozenset().union(*weights)
    loader = pss(platform.process("sllm-loaderd").pid)  # it has room for other models beside
    total = sum(sum(each.values()) for each in weights) + sum(loader.get(file, 0) for file in theirs)
    rest = [sum(pss(process.pid, weights=False).values()) for process in workers.values()]
    most = max(sum(each.values()) for each in weights)
    for key, mib in (("instance_weights_mib", most / _MIB), ("instance_rest_mib", sum(rest) / INSTANCES / _MIB)):
        case.extra[key] = round(mean_with(case.extra.get(key), len(case.samples), mib), 1)
    used = _used(platform, workers.values())
    case.take(round(total / _GB, 4), used.cpu_s - before, used.pss_mib)


def _used(platform: Platform, workers: Iterable[psutil.Process]) -> Usage:
    """By the platform, and by workers, which docker has below its daemon."""
    return usage({each.pid: each for each in (*platform.program.tree(), *workers)}.values())


def _until_gone(instances: set[str]) -> None:
    """No process of them has the weights mapped any more. Raises ``ProgramFailed``."""
    until = time.monotonic() + _GONE_S
    while left := dict(_workers(instances)):
        if time.monotonic() > until:
            raise ProgramFailed(f"{sorted(left)} still run {_GONE_S:g} s after their functions were deleted")
        time.sleep(0.05)


def _workers(instances: set[str]) -> Iterator[tuple[str, psutil.Process]]:
    """The process of each, wherever its engine has put it."""
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or ()).split()
        if len(words) > 1 and words[0] == "sllm-worker" and words[1] in instances:
            yield words[1], process


def pss(pid: int, *, weights: bool = True) -> dict[str, int]:
    """Bytes of a process's mappings of weights, or of all others, by the file's number: of each page its share among
    those who map it."""
    found: dict[str, int] = {}
    file, counted = "", False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            file, counted = rest[3], (f"memfd:{MEMFD_NAME} " in line) is weights
        elif first == "Pss:" and counted:
            found[file] = found.get(file, 0) + int(rest[0]) * 1024
    return found
