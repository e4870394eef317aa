"""The case ``relay`` of ``sandbox``: a stream out of a container, at its worker's socket and behind its invoker."""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, TypeAlias
from urllib.parse import urlsplit

import msgspec

from benchmarks.generator import TOKEN
from benchmarks.platform import Platform
from benchmarks.programs import ROOT, ProgramFailed, own_usage
from benchmarks.record import Aim
from benchmarks.runner import Run, in_turn
from benchmarks.sandbox_kinds import WARM, System, containers
from benchmarks.sandbox_worker import Worker, copied, packed
from benchmarks.streaming import Generator, generator
from benchmarks.streaming import System as Endpoint
from sllm.bundle import Bundle
from sllm_invoker.containers.engine import Engine
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.local import Layout
from sllm_runtime.platform.running import read_running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.frames import Frame, FrameKind, Segment, ToGateway

Token: TypeAlias = tuple[int, int, int]
"""When it came, its index, when it was made; times in ns of CLOCK_MONOTONIC."""
STAMPED: Final = ROOT / "benchmarks" / "functions" / "stamped" / "function.py"
INTERVAL_S: Final = 0.01
_LAST_S: Final = 10.0
_GATEWAY: Final = "g1"
_NODE: Final = "n1"


def measure(run: Run, platform: Platform, engine: Engine, directory: Path) -> None:
    """The two in turn, in the same container's function."""
    asyncio.run(_measure(run, platform, engine, directory))


async def _measure(run: Run, platform: Platform, engine: Engine, directory: Path) -> None:
    file = copied(STAMPED, directory, "stamped")
    function = packed(file)
    platform.deploy(file)
    headers = {"Authorization": f"Bearer {platform.token}"}
    endpoint = Endpoint("sllm", platform.program, urlsplit(platform.url).port or 0, "/fn/stamped", headers)
    count = 100 if run.quick else 500
    run.settings["relay_interval_ms"] = INTERVAL_S * 1e3
    with generator(directory) as load:
        async with containers(engine, directory / "relay") as systems:
            usage = platform.program.usage

            async def socket() -> dict[str, float]:
                return {"worker's socket": delay(await _at_the_socket(systems[WARM], function, count), count)}

            async def bus() -> dict[str, float]:
                return {"bus alone": delay(await _over_the_bus(platform, count), count)}

            async def invoker() -> dict[str, float]:
                tokens, client = await _behind_the_invoker(platform, endpoint, load, count)
                return {"sllm": delay(tokens, count), "HTTP client": round(client, 3)}

            turns = ((socket, own_usage), (bus, usage), (invoker, usage))
            for number in range(-1, run.rounds):  # the first finds nothing ready
                for turn, of in in_turn(turns, number):
                    before = of().cpu_s
                    found, after = await turn(), of()
                    for system, ms in found.items() if number >= 0 else ():
                        run.case("relay", system).take(ms, after.cpu_s - before, after.pss_mib)
    _aim(run)


def _aim(run: Run) -> None:
    ours, *limits = (run.case("relay", system).median for system in ("sllm", "worker's socket", "bus alone"))
    value = None
    if ours is not None and run.rounds >= run.least:
        value = round(ours - sum(each or 0.0 for each in limits), 3)
    run.aims.append(Aim("relay: sllm - worker's socket - bus alone, ms a token (medians)", value, at_most=0.3))


async def _at_the_socket(system: System, function: Bundle, count: int) -> list[Token]:
    await system.prepare()
    held = await system.take()
    try:
        await held.confine(function.manifest.memory, function.manifest.cpu)
        worker = Worker(held.wire)
        await worker.become(function, held.home)
        answer = await worker.call(function, {"count": count, "interval": INTERVAL_S})
    finally:
        await held.close()
    tokens = []
    for at, value in zip(answer.arrived, answer.values, strict=True):
        found = TOKEN.fullmatch(str(value).encode())
        if found is None:
            raise ProgramFailed(f"the worker's token was {value!r}")
        tokens.append((at, int(found[1]), int(found[2])))
    return tokens


async def _over_the_bus(platform: Platform, count: int) -> list[Token]:
    """Tokens that are published where an invoker publishes them, as they are made."""
    sender = await _bus(platform, _NODE)
    try:
        async with _observed(platform, count) as observer:
            for index in range(count):
                await asyncio.sleep(INTERVAL_S)
                data = msgspec.json.encode(f"t{index}@{time.monotonic_ns()}.")
                segment = Segment("benchmark", 1, (Frame(index, FrameKind.OUTPUT, data),))
                sender.publish_now(subjects.frames(_GATEWAY, _NODE), ToGateway((segment,)))
            return await observer.all_there()
    finally:
        await sender.close()


async def _behind_the_invoker(
    platform: Platform, endpoint: Endpoint, load: Generator, count: int
) -> tuple[list[Token], float]:
    """Tokens as a gateway gets them, and the median delay at the HTTP client in ms."""
    async with _observed(platform, count) as observer:
        unpaced = dataclasses.replace(endpoint.load(1, count, INTERVAL_S), interval=0.0)  # each is due when it is made
        outcome, _ = await asyncio.to_thread(load.run, endpoint, unpaced)
        if outcome.completed != 1:
            raise ProgramFailed(f"the stream was not whole: {outcome.errors or outcome}")
        return await observer.all_there(), outcome.delay_p50_ms


class Observer:
    """What nodes send to the gateway, got beside it."""

    def __init__(self, count: int) -> None:
        self.tokens: list[Token] = []
        self._count = count
        self._all = asyncio.Event()

    def on_message(self, message: ToGateway, _subject: str) -> None:
        now = time.monotonic_ns()
        frames = (frame for item in message.items if isinstance(item, Segment) for frame in item.frames)
        for frame in frames:
            if frame.kind is FrameKind.OUTPUT and (found := TOKEN.search(frame.data)):
                self.tokens.append((now, int(found[1]), int(found[2])))
        if len(self.tokens) >= self._count:
            self._all.set()

    async def all_there(self) -> list[Token]:
        """Every token."""
        async with asyncio.timeout(_LAST_S):
            await self._all.wait()
        return self.tokens


@asynccontextmanager
async def _observed(platform: Platform, count: int) -> AsyncIterator[Observer]:
    bus, observer = await _bus(platform, _GATEWAY), Observer(count)
    try:
        await bus.subscribe(subjects.frames_of(_GATEWAY), ToGateway, observer.on_message)
        await bus.flush()
        yield observer
    finally:
        await bus.close()


async def _bus(platform: Platform, name: str) -> Bus:
    running = read_running(platform.data)
    if running is None:
        raise ProgramFailed("the platform has ended")
    identity = str(Layout(platform.data).identity_file(name))
    settings = Settings.load({"SLLM_NATS_URL": running.nats_url, "SLLM_IDENTITY_FILE": identity})
    return await Bus.connect(settings, name, name="benchmark", jetstream=False)


def delay(tokens: Sequence[Token], count: int) -> float:
    """Median of arrival - making, ms. Raises ``ProgramFailed`` where they are not all there, once and in order."""
    if [index for _, index, _ in tokens] != list(range(count)):
        raise ProgramFailed(f"{len(tokens)} of {count} tokens came, or in another order")
    return round(statistics.median((at - made) / 1e6 for at, _, made in tokens), 3)
