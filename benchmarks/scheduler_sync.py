"""What it costs that the state is on the disk before it counts as stored: fenced writes of records, one after the other
as the leader makes them, to a nats-server with ``sync_interval: always`` and to one with its default (two minutes). A
third one is asked for nothing but a flushed round trip, which both have in them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.programs import ROOT, Program
from benchmarks.record import percentile
from benchmarks.runner import Run
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.nats_server import find_binary, free_port
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.records import InstanceRecord
from sllm_runtime.protocol.states import InstanceState

CASE: Final = "sync"
ALWAYS: Final = "sync_interval always"
DEFAULT: Final = "sync_interval default"
ROUND_TRIP: Final = "a round trip to the server"
WRITER: Final = "benchmark"


def measure(run: Run, directory: Path) -> None:
    """The case, in turns."""
    asyncio.run(_measured(run, directory))


async def _measured(run: Run, directory: Path) -> None:
    writes = 100 if run.quick else 1000
    times: dict[str, list[float]] = {}
    async with (
        _store(_configured(directory / "always", {"sync_interval": "always"})) as (server, bus, always),
        _store(_configured(directory / "default", {})) as (other, _, default),
    ):
        for number in range(run.rounds + 1):
            for system, program, store in ((ALWAYS, server, always), (DEFAULT, other, default)):
                with run.spending(program.usage, run.case(CASE, system, "1/s")):
                    took = [await _write(store, each) for each in range(writes)]
                _sample(run, system, took, times, counts=number > 0)
            took = [await _flush(bus) for _ in range(writes)]
            _sample(run, ROUND_TRIP, took, times, counts=number > 0)
    for system, all_of_them in times.items():
        case = run.case(CASE, system, "1/s")
        for p in (50, 99):
            case.extra[f"p{p}_ms"] = round(percentile([each * 1e3 for each in all_of_them], p), 3)
    run.case(CASE, ALWAYS, "1/s").notes = f"{writes} fenced writes of an instance's record a round, one at a time"


def _sample(run: Run, system: str, took: Sequence[float], times: dict[str, list[float]], *, counts: bool) -> None:
    """The first round is a warm-up."""
    if counts:
        run.case(CASE, system, "1/s").samples.append(round(len(took) / sum(took)))
        times.setdefault(system, []).extend(took)


async def _write(store: StateStore, number: int) -> float:
    """Seconds until the server has acknowledged it."""
    record = InstanceRecord(
        instance=f"chat-1-{number % 50:010x}", function="chat", version=1, node="n1", state=InstanceState.READY
    )
    began = time.perf_counter()
    await store.put(subjects.instance_key(record.instance), record)
    return time.perf_counter() - began


async def _flush(bus: Bus) -> float:
    began = time.perf_counter()
    await bus.flush()
    return time.perf_counter() - began


@dataclass(frozen=True)
class _Server:
    url: str
    config: Path


def _configured(directory: Path, more: dict[str, str]) -> _Server:
    """A server whose JetStream has ``more`` settings."""
    directory.mkdir(parents=True)
    port = free_port()
    store = {"store_dir": str(directory / "store"), "max_memory_store": 256 * MIB, **more}
    config = {"listen": f"127.0.0.1:{port}", "max_payload": MIB, "jetstream": store}
    (directory / "nats.conf").write_text(json.dumps(config))
    return _Server(f"nats://127.0.0.1:{port}", directory / "nats.conf")


@contextlib.asynccontextmanager
async def _store(server: _Server) -> AsyncIterator[tuple[Program, Bus, StateStore]]:
    """That server, which runs meanwhile, and the state on it; its fence is ours."""
    argv = [str(find_binary()), "-c", str(server.config)]
    env = {"PATH": os.environ.get("PATH", "")}
    with Program(argv, server.config.with_suffix(".log"), env=env, cwd=ROOT) as program:
        bus = await Bus.connect(Settings.load({"SLLM_NATS_URL": server.url}), WRITER, name=WRITER)
        try:
            state = await StateStore.open(bus, create=True)
            try:
                await state.elect(WRITER)
                yield program, bus, state
            finally:
                await state.close()
        finally:
            await bus.close()
