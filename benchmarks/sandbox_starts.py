"""The case ``start`` of ``sandbox``: each kind of sandbox by itself, without the platform."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.programs import ROOT, ProgramFailed, Usage, tree, usage
from benchmarks.record import Case
from benchmarks.runner import Run, in_turn
from benchmarks.sandbox_kinds import CONTAINERS, WARM, Held, System, containers, processes
from benchmarks.sandbox_worker import Worker, copied, packed
from sllm.bundle import Bundle
from sllm_invoker.containers import probe
from sllm_invoker.containers.arguments import Kind
from sllm_runtime.protocol.errors import Unavailable

ECHO: Final = ROOT / "functions" / "echo" / "function.py"
CALLS: Final = 40
IDLE_S: Final = 5.0
_ARGUMENTS: Final = {"text": "so", "times": 3}
_SAID: Final = {"text": "so so so", "length": 8}


@dataclass
class Start:
    """What one start took, in ms."""

    take: float
    limits: float
    worker: float
    calls: list[float]
    used: Usage
    """Of the sandbox and all that made it, from before it was made until it is ready; the memory is its own then."""
    calls_cpu_s: float


def measure(run: Run, directory: Path) -> None:
    """All kinds in turn."""
    asyncio.run(_measure(run, directory))


async def _measure(run: Run, directory: Path) -> None:
    function = packed(copied(ECHO, directory, "echoing"))
    async with AsyncExitStack() as stack:
        systems = dict(await stack.enter_async_context(processes(directory)))
        for kind in probe.KINDS:
            systems |= await _of_engine(run, kind, directory, stack)
        starts: dict[str, list[Start]] = {name: [] for name in systems}
        for number in range(run.rounds):
            for name, system in in_turn(tuple(systems.items()), number):
                run.note(f"start: {name}, {number + 1} of {run.rounds}")
                home = directory / f"{name}-{number}".replace(" ", "-")
                starts[name].append(await one_start(system, function, home))
                if name.startswith(WARM):
                    run.case("idle", name, "ms/s").take(*await _idle(system))
    for name, made in starts.items():
        _take(run.case("start", name), run.case("call", name), made)


async def _of_engine(run: Run, kind: Kind, directory: Path, stack: AsyncExitStack) -> dict[str, System]:
    try:
        engine = await probe.find(kind)
    except Unavailable as error:
        for name in CONTAINERS:
            run.case("start", f"{name} ({kind})").not_run = error.message
        return {}
    made = await stack.enter_async_context(containers(engine, directory))
    return {f"{name} ({kind})": system for name, system in made.items()}


async def one_start(system: System, function: Bundle, home: Path) -> Start:
    """One start and its calls."""
    before = usage(tree(os.getpid())).cpu_s
    await system.prepare()
    times = [time.perf_counter()]
    held = await system.take()
    try:
        times.append(time.perf_counter())
        await held.confine(function.manifest.memory, function.manifest.cpu)
        times.append(time.perf_counter())
        worker = Worker(held.wire)
        await worker.become(function, held.home or home)
        times.append(time.perf_counter())
        take, limits, start = ((after - before) * 1e3 for before, after in itertools.pairwise(times))
        ready = _used(held)
        calls = [await _call(worker, function) for _ in range(CALLS)]
        own = Usage(ready.cpu_s - before, usage(tree(held.pid)).pss_mib)
        return Start(take, limits, start, calls, own, _used(held).cpu_s - ready.cpu_s)
    finally:
        await held.close()


async def _call(worker: Worker, function: Bundle) -> float:
    began = time.perf_counter()
    answer = await worker.call(function, _ARGUMENTS)
    took = (time.perf_counter() - began) * 1e3
    if answer.values != (_SAID,):
        raise ProgramFailed(f"echo answered {answer.values}")
    return took


def _used(held: Held) -> Usage:
    """By this process and what is below it, and by the sandbox, which may be below another one."""
    return usage({each.pid: each for each in (*tree(os.getpid()), *tree(held.pid))}.values())


async def _idle(system: System) -> tuple[float, float, float]:
    """Milliseconds of CPU in a second that a sandbox uses while it waits; the CPU seconds of all of it, and MiB."""
    await system.prepare()
    held = await system.take()
    try:
        before, began = _cpu_ns(held.pid), time.monotonic()
        await asyncio.sleep(IDLE_S)
        used, took = _cpu_ns(held.pid) - before, time.monotonic() - began
        return round(used / 1e6 / took, 4), used / 1e9, usage(tree(held.pid)).pss_mib
    finally:
        await held.close()


def _cpu_ns(pid: int) -> int:
    """Of all threads of a process and what is below it."""
    first = psutil.Process(pid)
    total = 0
    for process in (first, *first.children(recursive=True)):
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total


def _take(start: Case, call: Case, made: list[Start]) -> None:
    for each in made:
        start.take(round(each.take + each.limits + each.worker, 2), each.used.cpu_s, each.used.pss_mib)
        call.take(round(statistics.median(each.calls), 3), each.calls_cpu_s, each.used.pss_mib)
    for part in ("take", "limits", "worker"):
        start.extra[f"{part}_ms"] = round(statistics.median(getattr(each, part) for each in made), 2)
