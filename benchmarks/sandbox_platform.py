"""The cases of ``sandbox`` that need a platform whose functions run in containers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import psutil

from benchmarks import sandbox_relay, synthetic
from benchmarks.cold_cases import CODER, Check, Stages, cold_call, until_quiet
from benchmarks.cold_gigabyte import FUNCTION, STEP
from benchmarks.platform import Platform
from benchmarks.programs import ProgramFailed
from benchmarks.record import Aim, ratio
from benchmarks.runner import Run
from benchmarks.sandbox_worker import copied
from sllm_invoker.containers import probe
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.base import Base
from sllm_invoker.images.store import Store
from sllm_loaderd.chunk import MEMFD_NAME
from sllm_runtime.protocol.errors import Unavailable

CASES: Final = ("demo", "relay", "memory")
INSTANCES: Final = 10
NBYTES: Final = 10**9
_FEW: Final = 2**28
_GB: Final = 1e9
_MIB: Final = 2**20


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
    image = asyncio.run(Base(Store(engine), directory / "image", dict(os.environ)).ensure(run.note))
    isolated = {
        "SLLM_SANDBOX": engine.kind,
        "SLLM_REQUIRE_ISOLATION": "true",
        "SLLM_IMAGE": image,
    }
    with Platform(directory / "containers", isolated) as platform:
        for case in cases:
            with run.attempt(case):
                work[case](platform, engine)


def demo(run: Run, inside: Platform, directory: Path) -> None:
    """The demo's function from nothing, in a container and in a process in turn."""
    check = Check()
    with Platform(directory / "processes") as outside:
        both = (("process", outside, Stages()), ("sllm", inside, Stages()))
        for _, platform, _ in both:
            platform.deploy(CODER, keep_alive=0.0)
        until_quiet(outside)
        for _ in range(run.rounds):
            for system, platform, stages in both:
                cold_call(platform, run.case("demo", system), stages, check)
        for system, _, stages in both:
            stages.into(run.case("demo", system))
    value = ratio(run.case("demo", "sllm"), run.case("demo", "process"), least=run.least)
    run.aims.append(Aim("demo: first token from a warm container / from a warm process", value, at_most=1.15))


def memory(run: Run, platform: Platform, directory: Path) -> None:
    """Ten functions with one model, each of which has read every byte of it."""
    file = copied(FUNCTION, directory, "large")
    model = synthetic.write(file.with_name("model"), _FEW if run.quick else NBYTES, STEP)
    names = [platform.deploy(file, name=f"large-{n}", keep_alive=600.0, memory=_FEW) for n in range(INSTANCES)]
    for name in names:
        text = platform.stream(name, {"every": True}).text
        if text != str(model.whole):
            raise ProgramFailed(f"{name} read other bytes: digest {text}, written were {model.whole}")
    workers = dict(_workers({i["instance"] for name in names for i in platform.function(name)["instances"]}))
    if len(workers) != INSTANCES:
        raise ProgramFailed(f"{len(workers)} of {INSTANCES} instances run: {sorted(workers)}")
    weights = [pss(process.pid) for process in workers.values()]
    theirs = frozenset().union(*weights)
    loader = pss(platform.process("sllm-loaderd").pid)  # it has room for other models beside
    total = sum(sum(each.values()) for each in weights) + sum(loader.get(file, 0) for file in theirs)
    case = run.case("memory", "sllm", "GB")
    case.samples.append(round(total / _GB, 4))
    case.notes = f"weights as {INSTANCES} instances and loaderd share them"
    rest = [sum(pss(process.pid, weights=False).values()) for process in workers.values()]
    case.extra |= {
        "model_gb": round(model.nbytes / _GB, 4),
        "instance_weights_mib": round(max(sum(each.values()) for each in weights) / _MIB, 1),
        "instance_rest_mib": round(sum(rest) / INSTANCES / _MIB, 1),
    }
    value = None if run.quick else case.median
    run.aims.append(Aim("memory: weights of ten instances of a model of 1 GB, GB", value, at_most=1.1))


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
