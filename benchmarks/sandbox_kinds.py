"""The sandboxes that ``sandbox`` compares: what each has ready before somebody asks, and what it does then."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from benchmarks.programs import ROOT, ProgramFailed
from sllm_invoker.containers import arguments, choice
from sllm_invoker.containers.arguments import ContainerSpec
from sllm_invoker.containers.driver import ContainerDriver
from sllm_invoker.containers.engine import Engine
from sllm_invoker.images.functions import FunctionImages
from sllm_invoker.node import sandbox_environment
from sllm_invoker.process_driver import ProcessDriver
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.worker import FromWorker, Hello

READY_S: Final = 120.0
PROCESSES: Final = ("bare process", "warm process pool")
WARM: Final = "warm container pool"
CONTAINERS: Final = ("cold container", "created, not started", "paused", WARM)
_names: Iterator[str] = (f"sb-bench-{os.getpid()}-{number}" for number in itertools.count())


class Held(Protocol):
    """A worker that has said ``Hello``."""

    @property
    def wire(self) -> AsyncWire:
        """The socket to it."""

    @property
    def pid(self) -> int:
        """Of the process that everything of it is, or is below."""

    @property
    def home(self) -> str:
        """Directory of its instance; "": one on this machine."""

    async def confine(self, memory: int, cpu: float) -> None:
        """Set its limits."""

    async def close(self) -> Any:
        """End it."""


class System(Protocol):
    """One way to have a worker."""

    async def prepare(self) -> None:
        """All that is done before somebody asks."""

    async def take(self) -> Held:
        """What somebody who asks waits for."""


@dataclass
class BareProcess:
    """``bare_worker`` behind a socket."""

    wire: AsyncWire
    process: asyncio.subprocess.Process
    home: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    async def confine(self, memory: int, cpu: float) -> None:
        """It has no limits."""

    async def close(self) -> None:
        self.wire.close()
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class Bare:
    """A Python is started that imports what a worker needs."""

    async def prepare(self) -> None:
        pass

    async def take(self) -> Held:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            words = (sys.executable, "-m", "benchmarks.bare_worker", "--fd", str(fd))
            process = await asyncio.create_subprocess_exec(
                *words, pass_fds=(fd,), cwd=ROOT, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL
            )
        made = BareProcess(AsyncWire(ours), process)
        async with asyncio.timeout(READY_S):
            payload = await made.wire.receive()
        if payload is None or not isinstance(codec.unpack(FromWorker, payload).body, Hello):
            await made.close()
            raise ProgramFailed("a bare worker said no hello")
        return made


class Waiting:
    """A sandbox of ``driver`` that waits, as the warm pool's do."""

    def __init__(self, driver: ContainerDriver | ProcessDriver) -> None:
        self._driver = driver
        self._name = ""
        self._waits: Held | None = None

    async def prepare(self) -> None:
        self._name = next(_names)
        self._waits = await self._driver.create(self._name)

    async def take(self) -> Held:
        assert self._waits is not None
        return self._waits


class Paused(Waiting):
    """One that waits and gets no CPU meanwhile."""

    def __init__(self, driver: ContainerDriver, engine: Engine) -> None:
        super().__init__(driver)
        self._engine = engine

    async def prepare(self) -> None:
        await super().prepare()
        await self._engine.command("pause", self._name)

    async def take(self) -> Held:
        await self._engine.command("unpause", self._name)
        return await super().take()


class Cold:
    """Nothing is there but the image."""

    def __init__(self, driver: ContainerDriver) -> None:
        self._driver = driver

    async def prepare(self) -> None:
        pass

    async def take(self) -> Held:
        return await self._driver.create(next(_names))


@dataclass(frozen=True)
class TwoSteps(Engine):
    """``run`` as ``create`` and, when it is let go, ``start``."""

    created: asyncio.Event = field(default_factory=asyncio.Event)
    go: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, spec: ContainerSpec, command: tuple[str, ...]) -> str:
        _run, _detach, *words = arguments.run(self.kind, spec, command)
        container = (await self.command("create", *words)).strip()
        self.created.set()
        await self.go.wait()
        await self.command("start", spec.name)
        return container


class Created:
    """A container that is made and not started."""

    def __init__(self, driver: ContainerDriver, engine: TwoSteps) -> None:
        self._driver, self._engine = driver, engine
        self._making: asyncio.Task[Any] | None = None

    async def prepare(self) -> None:
        self._engine.created.clear()
        self._engine.go.clear()
        self._making = asyncio.create_task(self._driver.create(next(_names)), name="create")
        created = asyncio.create_task(self._engine.created.wait(), name="created")
        waits: set[asyncio.Task[Any]] = {created, self._making}
        await asyncio.wait(waits, timeout=READY_S, return_when=asyncio.FIRST_COMPLETED)
        created.cancel()
        if self._making.done():
            self._making.result()

    async def take(self) -> Held:
        assert self._making is not None
        self._engine.go.set()
        held: Held = await self._making
        return held


@asynccontextmanager
async def processes(directory: Path) -> AsyncIterator[dict[str, System]]:
    """Those that are processes, by name."""
    settings = _settings(directory / "process")
    (settings.data_dir / "tmp").mkdir(parents=True)
    driver = ProcessDriver(sandbox_environment(os.environ, settings))
    await driver.start()
    try:
        yield dict(zip(PROCESSES, (Bare(), Waiting(driver)), strict=True))
    finally:
        await driver.close()


@asynccontextmanager
async def containers(engine: Engine, directory: Path) -> AsyncIterator[dict[str, System]]:
    """Those that are containers of ``engine``, by name."""
    two_steps = TwoSteps(engine.kind, engine.program, engine.options)
    images = choice.images(_settings(directory / "images"), engine, os.environ)
    await images.ensure(None, (), lambda _step: None)  # no start's time: a node makes it when it comes up
    async with AsyncExitStack() as stack:
        plain, made = [
            await _driver(directory / f"{engine.kind}-{number}", each, images, stack)
            for number, each in enumerate((engine, two_steps))
        ]
        systems: tuple[System, ...] = (Cold(plain), Created(made, two_steps), Paused(plain, engine), Waiting(plain))
        yield dict(zip(CONTAINERS, systems, strict=True))


async def _driver(directory: Path, engine: Engine, images: FunctionImages, stack: AsyncExitStack) -> ContainerDriver:
    driver = choice.driver(_settings(directory), engine, images)
    await driver.start()
    stack.push_async_callback(driver.close)
    return driver


def _settings(directory: Path) -> InvokerSettings:
    """A node's. ``preload``: the fork server imports nothing in the middle of a measurement."""
    place = directory / "node"
    place.mkdir(parents=True)
    return InvokerSettings.load(
        {"SLLM_HOME": str(directory)}, node="bench", data_dir=place, loaderd_socket=place / "none", preload="engine"
    )
