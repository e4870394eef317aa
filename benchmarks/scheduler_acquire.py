"""``acquire`` over NATS, as a gateway asks: a real controller process and nodes that are simulated.

A nats-server, ``python -m sllm_runtime.control`` and one process that plays the nodes (``scheduler_nodes``), each its
own; this one is the gateway. Functions and models are in the store before the controller is elected.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.programs import ROOT, Program, ProgramFailed
from benchmarks.record import Case, percentile
from benchmarks.runner import Run
from benchmarks.scheduler_cluster import GPUS, SEED, cluster
from sllm_runtime.control.view import Key
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.nats_server import find_binary, free_port
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.limits import MIB

MODELS: Final = 400
AT_ONCE: Final = 16
"""Questions under way where the rate is measured."""
ANSWER_S: Final = 30.0
READY_S: Final = 120.0
EMPTY_S: Final = 60.0
KEEP_ALIVE_S: Final = 1.0
"""Of what was started: a round begins when all of the last one has ended."""
GATEWAY: Final = "gw"
_STEP_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class World:
    """What a round speaks to."""

    bus: Bus
    nodes: Program
    keys: Sequence[Key]
    batch: int
    """Starts in a row: half of the accelerators, so that nothing waits for room."""

    async def acquire(self, key: Key) -> float:
        """Seconds until a gateway has the route. Raises ``ProgramFailed`` if it gets none."""
        asked = ctl.Acquire(function=key[0], version=key[1], gateway=GATEWAY, waiting=1, wait_s=ANSWER_S)
        began = time.perf_counter()
        answer = await self.bus.call(subjects.ctl("acquire"), asked, ctl.Acquired, timeout_s=2 * ANSWER_S)
        took = time.perf_counter() - began
        if answer.route is None or not answer.route.entries:
            raise ProgramFailed(f"no instance of {key[0]}: {answer.error or answer.pending or answer.progress}")
        return took

    async def emptied(self) -> None:
        """Wait until no instance is left on the nodes."""
        until = time.monotonic() + EMPTY_S
        while await asyncio.to_thread(self._held):
            if time.monotonic() > until:
                raise ProgramFailed(f"instances that nobody calls are still there after {EMPTY_S:g} s")
            await asyncio.sleep(_STEP_S)

    def _held(self) -> int:
        self.nodes.say({})
        return int(self.nodes.hear(READY_S)["held"])


def measure(run: Run, nodes: int, directory: Path) -> None:
    """The case for ``nodes`` nodes."""
    with _started(nodes, directory) as (url, program, controller):
        asyncio.run(_rounds(run, nodes, url, program, controller))


async def _rounds(run: Run, nodes: int, url: str, program: Program, controller: Program) -> None:
    async with _bus(url) as bus:
        await _leads(bus, nodes)
        _, keys = cluster(nodes, MODELS, random.Random(SEED))
        world = World(bus, program, keys, min(nodes * GPUS // 2, 100 if run.quick else MODELS))
        await _round(world, [])  # connections, first reports, code that runs for the first time
        samples: list[float] = []
        starts = run.case("acquire", f"{nodes} simulated nodes, a start", "1/s")
        ready = run.case("acquire", f"{nodes} simulated nodes, an instance", "1/s")
        known: list[float] = []
        for _ in range(run.rounds):
            with run.spending(controller.usage, starts):
                starts.samples.append(round(await _round(world, samples)))
            with run.spending(controller.usage, ready):
                ready.samples.append(round(await _known(world, known)))
        for case, times in ((starts, samples), (ready, known)):
            _latencies(case, times)
        starts.notes = f"{world.batch} starts a round, {AT_ONCE} questions at once; then one at a time"


async def _round(world: World, times: list[float]) -> float:
    """Starts a second with AT_ONCE questions, then the latency of as many one by one into ``times``."""
    await world.emptied()
    took = await _at_once(world, world.keys[: world.batch])
    await world.emptied()
    times += [await world.acquire(key) for key in world.keys[: world.batch]]
    return world.batch / took


async def _known(world: World, times: list[float]) -> float:
    """The same where an instance is there: the last one that was started, asked for again and again."""
    key, count = world.keys[0], 200
    await world.acquire(key)
    took = await _at_once(world, [key] * count)
    times += [await world.acquire(key) for _ in range(count // 2)]
    return count / took


async def _at_once(world: World, keys: Sequence[Key]) -> float:
    left = iter(keys)

    async def asker() -> None:
        for key in left:
            await world.acquire(key)

    began = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(AT_ONCE):
                group.create_task(asker())
    except ExceptionGroup as failed:
        raise ProgramFailed(str(failed.exceptions[0])) from failed
    return time.perf_counter() - began


def _latencies(case: Case, times: Sequence[float]) -> None:
    for p in (50, 99):
        case.extra[f"p{p}_ms"] = round(percentile([each * 1e3 for each in times], p), 2)


# --- what runs beside it ------------------------------------------------------------------------------
@contextlib.contextmanager
def _started(nodes: int, directory: Path) -> Iterator[tuple[str, Program, Program]]:
    """NATS, its store filled, the nodes and the controller; all end with the block."""
    directory.mkdir(parents=True)
    port = free_port()
    url = f"nats://127.0.0.1:{port}"
    store = {"store_dir": str(directory / "store"), "max_memory_store": 256 * MIB, "sync_interval": "always"}
    config = {"listen": f"127.0.0.1:{port}", "max_payload": MIB, "jetstream": store}
    (directory / "nats.conf").write_text(json.dumps(config))
    kept = {key: "" for key in os.environ if key.startswith("SLLM_")}
    env = {**kept, "SLLM_HOME": str(directory), "SLLM_NATS_URL": url}
    python = [sys.executable, "-m"]
    with contextlib.ExitStack() as stack:

        def run(name: str, argv: Sequence[str]) -> Program:
            return stack.enter_context(Program(argv, directory / f"{name}.log", env=env, cwd=ROOT))

        run("nats", [str(find_binary()), "-c", str(directory / "nats.conf")])
        asyncio.run(_fill(url, nodes))
        simulated = run("nodes", [*python, "benchmarks.scheduler_nodes", str(nodes), str(MODELS)])
        simulated.hear(READY_S)
        yield url, simulated, run("controller", [*python, "sllm_runtime.control"])


@contextlib.asynccontextmanager
async def _bus(url: str) -> AsyncIterator[Bus]:
    bus = await Bus.connect(Settings.load({"SLLM_NATS_URL": url}), GATEWAY, name="benchmark")
    try:
        yield bus
    finally:
        await bus.close()


async def _fill(url: str, nodes: int) -> None:
    """What a controller would have written in deploying."""
    view, _ = cluster(nodes, MODELS, random.Random(SEED), KEEP_ALIVE_S)
    async with _bus(url) as bus:
        store = await StateStore.open(bus, create=True)
        try:
            await store.elect("benchmark")
            for model in view.models.values():
                await store.put(subjects.model_key(model.digest), model)
            for function in view.functions.values():
                await store.put(subjects.function_key(function.function), function)
            for version in view.versions.values():
                await store.put(subjects.version_key(version.function, version.version), version)
        finally:
            await store.close()


async def _leads(bus: Bus, nodes: int) -> None:
    """Wait until the controller answers and has heard every node."""
    until = time.monotonic() + READY_S
    while True:
        with contextlib.suppress(SllmError):
            if await _alive(bus) == nodes:
                return
        if time.monotonic() > until:
            raise ProgramFailed(f"the controller has not heard {nodes} nodes after {READY_S:g} s")
        await asyncio.sleep(_STEP_S)


async def _alive(bus: Bus) -> int:
    found, after = 0, ""
    while True:
        page = await bus.call(subjects.ctl("nodes"), ctl.Listing(after=after), ctl.NodeList, timeout_s=ANSWER_S)
        found += sum(node.alive for node in page.nodes)
        if not page.next:
            return found
        after = page.next
