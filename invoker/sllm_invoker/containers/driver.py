"""Makes sandboxes that are containers, and removes those that an earlier life of this node has left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from sllm_invoker.containers import control_group, probe
from sllm_invoker.containers.arguments import ContainerSpec, Owner
from sllm_invoker.containers.control_group import Group
from sllm_invoker.containers.engine import Engine, EngineFailed
from sllm_invoker.containers.health import Health
from sllm_invoker.containers.monitor import Monitor
from sllm_invoker.containers.rendezvous import Rendezvous, peer_pid
from sllm_invoker.containers.sandbox import ContainerSandbox, Parts
from sllm_invoker.containers.user import PROCESSES, user_here
from sllm_invoker.sandbox import PLAIN, Sandbox, Wish
from sllm_invoker.workdir import Workdirs
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.worker import FromWorker, Hello, Spawn, ToZygote

log = logging.getLogger(__name__)

MEET_S: Final = 60.0
"""From the engine's word that a container runs to its first process's connection."""
PROMPT_S: Final = 2.0
HELLO_S: Final = 120.0
"""Importing torch from a cold disk takes its time."""
REMOVE_AGAIN_S: Final = (1.0, 5.0, 30.0)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a warm sandbox may use, before it is known what it will run; and what it keeps when it is."""

    memory: int
    cpu: float
    pids: int
    tmp: int


Image = Callable[[], Coroutine[Any, Any, str]]
"""Names the image, and makes it where it is not there yet."""


def vanished(place: Path) -> bool:
    """Whether no node can have its data there; False where that is not to be seen."""
    try:
        return not place.exists()
    except OSError:
        return False


class ContainerDriver:
    """``SandboxDriver`` over one engine and one image, which is made while the node starts if it is not there.
    ``root``: directory for the rendezvous, this driver's alone."""

    def __init__(
        self, engine: Engine, image: Image, command: Sequence[str], owner: Owner, root: Path, sizes: Sizes
    ) -> None:
        self._engine = engine
        self._image = image
        self._command = tuple(command)
        self._owner = owner
        self._root = root
        self._sizes = sizes
        self._user = user_here(engine)
        self._tasks = Tasks("container driver")
        self._health = Health(partial(probe.trial, engine), self._tasks)
        self._making: asyncio.Task[str] | None = None
        self._living: dict[str, ContainerSandbox] = {}
        """Until the engine has been told to remove them."""
        self._python = ""

    @property
    def python(self) -> str:
        """Version of Python in its own image; empty before the first worker is ready."""
        return self._python

    @property
    def problem(self) -> str:
        """What is the matter with the engine."""
        return self._health.problem

    async def start(self) -> None:
        """Remove what an earlier life of this node has left, and nodes that are gone. Raises ``Unavailable``."""
        self._engine.listeners.append(self._health.suspect)
        for name, place in (await self._engine.places()).items():
            if place == self._owner.place or vanished(Path(place)):
                log.info("container %s was left by an earlier life of the node at %s and is removed", name, place)
                await self._engine.abandon(name)
                try:
                    await self._engine.remove(name)
                except EngineFailed as error:  # whether the engine works its health finds out
                    log.error("container %s is not removed: %s", name, error.message)
                    self._remove_later(name)
        Workdirs(self._root).reset()
        self._making = self._make_image()

    def _make_image(self) -> asyncio.Task[str]:
        return self._tasks.start(self._image(), "image")

    async def _named(self) -> str:
        """The image, once it is there. Raises ``Unavailable``; the next who asks tries again."""
        if self._making is None or (self._making.done() and (self._making.cancelled() or self._making.exception())):
            self._making = self._make_image()
        return await asyncio.shield(self._making)

    def serves(self, wish: Wish) -> bool:
        """Those that wait have no network and no device."""
        return wish == PLAIN

    def on_complete(self, call: Callable[[], None]) -> None:
        """Never: the worker of a container imports what it needs when it starts."""

    async def ready(self, wish: Wish = PLAIN) -> None:
        """The engine works, and its image is there: a function's own was made before it was asked for. Raises
        ``Unavailable``."""
        if self._health.problem:
            raise Unavailable(self._health.problem)
        if not wish.image:
            await self._named()

    async def create(self, name: str, wish: Wish = PLAIN) -> Sandbox:
        """A container whose worker has said ``Hello``. Raises ``Unavailable``, at once if the engine does not work."""
        await self.ready(wish)
        sandbox = await self._make(name, wish)
        try:
            sandbox.hello = await self._greeting(sandbox)
        except BaseException:
            await sandbox.close()
            raise
        if not wish.image:  # a function's own image may have another
            self._python = sandbox.hello.python
        return sandbox

    # --- one container --------------------------------------------------------------------------------
    async def _make(self, name: str, wish: Wish) -> ContainerSandbox:
        """A container that runs, and has what it needs to start its worker."""
        image = wish.image or await self._named()
        async with AsyncExitStack() as trial:
            rendezvous = Rendezvous(self._root, name, self._user)
            trial.callback(rendezvous.close)
            trial.push_async_callback(self._remove, name, rendezvous)
            container = await self._run(self._spec(name, image, rendezvous, wish))
            connection = await self._met(name, rendezvous)
            trial.callback(connection.close)
            pid = peer_pid(connection)
            if pid == 0:
                raise Unavailable(f"the processes of {self._engine.kind}'s containers are not to be seen from here")
            try:
                pidfd = os.pidfd_open(pid)
            except ProcessLookupError as error:
                raise await self._early_end(name, "before it was given anything") from error
            trial.callback(os.close, pidfd)
            parts = _equip(name, rendezvous, connection, pid, pidfd, self._group(container, pid))
            trial.pop_all()
        made = ContainerSandbox(name, self._engine, parts, self._sizes.memory, self._tasks, self._closed)
        self._living[name] = made
        return made

    async def _run(self, spec: ContainerSpec) -> str:
        """Its id. Where the engine refuses, the image is looked for again before the next: somebody may have removed
        it (`image prune`)."""
        try:
            return await self._engine.run(spec, self._command)
        except EngineFailed:
            if self._making is not None and self._making.done():
                self._making = None
            raise

    def _group(self, container: str, pid: int) -> Group | None:
        """Its control group, where that can be written to from here: looked for now, so that a start need not."""
        try:
            return control_group.find(container, pid)
        except Unavailable as error:
            log.info("limits of container %.12s are set by %s: %s", container, self._engine.kind, error.message)
            return None

    def _spec(self, name: str, image: str, rendezvous: Rendezvous, wish: Wish) -> ContainerSpec:
        sizes = self._sizes
        return ContainerSpec(
            name=name,
            image=image,
            owner=self._owner,
            rendezvous=rendezvous.door,
            user=self._user,
            memory=sizes.memory,
            cpu=sizes.cpu,
            pids=sizes.pids,
            tmp=sizes.tmp,
            files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            processes=min(PROCESSES, _hard(resource.RLIMIT_NPROC)),
            network=wish.network,
            cluster=wish.cluster,
            gpus=wish.gpus,
            monitor=rendezvous.monitor,
        )

    async def _met(self, name: str, rendezvous: Rendezvous) -> socket.socket:
        """Its connection; where it ends before it connects, that is said at once."""
        meeting = asyncio.create_task(rendezvous.admit(), name=f"meet {name}")
        waits: set[asyncio.Task[Any]] = {meeting}
        try:
            await asyncio.wait(waits, timeout=PROMPT_S)
            if not meeting.done():  # few are so late: the engine is asked for them alone
                waits.add(asyncio.create_task(self._engine.wait(name, MEET_S), name=f"wait {name}"))
                await asyncio.wait(waits, timeout=MEET_S, return_when=asyncio.FIRST_COMPLETED)
            if meeting.done():
                return meeting.result()
            raise await self._early_end(name, f"at once, or did not connect within {MEET_S:g} s")
        finally:
            for task in waits:
                task.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _early_end(self, name: str, when: str) -> Unavailable:
        said = await self._engine.last_words(name)
        return Unavailable(f"container {name} ended {when}{': ' + said if said else ''}")

    async def _greeting(self, sandbox: ContainerSandbox) -> Hello:
        try:
            async with asyncio.timeout(HELLO_S):
                payload = await sandbox.wire.receive()
            if payload is None:
                end = await sandbox.exited
                raise Unavailable(f"the worker of container {sandbox.name} ended early: {end}{_said(sandbox.stderr)}")
            message = codec.unpack(FromWorker, payload)
        except TimeoutError as error:
            raise Unavailable(f"the worker of container {sandbox.name} said no hello within {HELLO_S:g} s") from error
        except ProtocolError as error:
            raise Unavailable(f"container {sandbox.name} speaks another protocol: {error.message}") from error
        if not isinstance(message.body, Hello) or message.version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            raise Unavailable(f"container {sandbox.name} speaks another protocol (version {message.version})")
        return message.body

    # --- their end ------------------------------------------------------------------------------------
    async def _remove(self, name: str, rendezvous: Rendezvous) -> None:
        """Of a container that became no sandbox."""
        monitor = Monitor(rendezvous.monitor)
        try:
            await self._engine.remove(name)
        except EngineFailed as error:
            log.error("container %s is not removed: %s", name, error.message)
            self._remove_later(name)
        await monitor.ended(MEET_S)

    def _closed(self, name: str, removed: bool) -> None:
        del self._living[name]
        if not removed:
            self._remove_later(name)

    def _remove_later(self, name: str) -> None:
        self._tasks.start(self._remove_again(name), f"remove {name}")

    async def _remove_again(self, name: str) -> None:
        """The engine could not; perhaps later it can. What is left then goes at the node's next start."""
        for delay in REMOVE_AGAIN_S:
            await asyncio.sleep(delay)
            try:
                await self._engine.remove(name)
            except EngineFailed as error:
                log.error("container %s is not removed: %s", name, error.message)
            else:
                return

    async def close(self) -> None:
        """Kill every container of ours."""
        with contextlib.suppress(ValueError):  # it did not start
            self._engine.listeners.remove(self._health.suspect)
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._living.values())))
        await self._tasks.close()


def _equip(
    name: str, rendezvous: Rendezvous, connection: socket.socket, pid: int, pidfd: int, group: Group | None
) -> Parts:
    """Hand over the worker's socket and the writing ends of its pipes. Takes ``connection`` and ``pidfd`` over."""
    with contextlib.ExitStack() as handed, contextlib.ExitStack() as kept:  # each may be the one too many
        ours, theirs = socket.socketpair()
        kept.callback(ours.close)
        handed.callback(theirs.close)
        pipes = []
        for _ in range(2):
            end, other = os.pipe2(os.O_CLOEXEC)
            kept.callback(os.close, end)
            handed.callback(os.close, other)
            os.set_blocking(end, False)
            pipes.append((end, other))
        (out, out_end), (err, err_end) = pipes
        first = AsyncWire(connection, max_fds=0)
        first.send(codec.pack(ToZygote(Spawn(sandbox=name))), (theirs.fileno(), out_end, err_end))
        monitor = Monitor(rendezvous.monitor)
        kept.pop_all()
    return Parts(rendezvous, first, AsyncWire(ours, max_fds=0), out, err, pidfd, pid, monitor, group)


def _said(pipe: int) -> str:
    try:
        text = os.read(pipe, 4096).decode(errors="replace").strip()
    except BlockingIOError:
        text = ""
    return f"; it said: {' | '.join(text.splitlines()[-5:])}" if text else ""


def _hard(limit: int) -> int:
    hard = resource.getrlimit(limit)[1]
    return PROCESSES if hard == resource.RLIM_INFINITY else hard
