"""The node's fork server as a child process: started, told to fork, watched, started again with back-off.

Where the kernel permits it, the fork server is process 1 of a PID namespace of its own: then nothing its workers
start can outlive it, however it detaches itself. Elsewhere it is a subreaper that kills what it adopts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sllm_runtime.platform import oom_kills
from sllm_runtime.platform.process import PARENT, Child
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.worker import (
    Complete,
    Exited,
    FromZygote,
    Spawn,
    Spawned,
    Started,
    ToZygote,
    Unborn,
    ZygoteReady,
)

log = logging.getLogger(__name__)

ZYGOTE: Final = (sys.executable, "-m", "sllm_runtime.worker.zygote")
READY_S: Final = 120.0
"""Importing torch from a cold disk takes its time."""
SPAWN_S: Final = 30.0
STILLBORN: Final = 3
"""So many in a row that end before they are ready, and who waits for one is told; it is tried again all the same."""
BACKOFF_S: Final = (0.0, 0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
_ROOT: Final = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_USER: Final = (
    "unshare",
    "--user",
    "--map-current-user",
    "--keep-caps",
    "--pid",
    "--fork",
    "--kill-child",
    "--mount-proc",
)


async def namespace_command() -> tuple[str, ...]:
    """The words before a command that give it a PID namespace; empty where none is permitted. Tries it, once."""
    for words in (_ROOT,) if os.geteuid() == 0 else (_USER,):
        try:
            async with asyncio.timeout(10.0):
                process = await asyncio.create_subprocess_exec(
                    *words, "true",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )  # fmt: skip
                try:
                    if await process.wait() == 0:
                        return words
                finally:
                    if process.returncode is None:
                        process.kill()
                        await process.wait()
        except (OSError, TimeoutError):
            continue
    return ()


@dataclass
class Born:
    """A worker that was forked. The receiver owns the descriptor ``pidfd``."""

    pidfd: int


class ForkServer:
    """Client of one fork server at a time. ``run`` keeps one alive until cancelled."""

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        argv: Sequence[str] = ZYGOTE,
        namespace: Sequence[str] = (),
        on_exit: Callable[[str, Exited], None],
        on_complete: Callable[[], object] = lambda: None,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._env = dict(env)
        self._argv = tuple(argv)
        self._namespace = tuple(namespace)
        self._on_exit = on_exit
        self._on_complete = on_complete
        self._on_end = on_end
        self._wire: AsyncWire | None = None
        self._settled = asyncio.Event()
        """Whether it is ready, or does not become it (``_why``)."""
        self._why = ""
        self._stillborn = 0
        self._births: dict[str, asyncio.Future[Born]] = {}
        self._child: Child | None = None
        self._kills = 0
        """How many processes the kernel had killed for memory when this life of it began."""
        self.python = ""
        """Version of its workers' Python; empty before the first is ready."""

    @property
    def pid(self) -> int:
        """Process id of the child we started (in a namespace: of ``unshare``); 0 when there is none."""
        return self._child.pid if self._child is not None and self._child.process is not None else 0

    async def ready(self) -> None:
        """Wait for the fork server if it is just starting. Raises ``Unavailable`` after READY_S, or if it ended too
        often before it was ready."""
        try:
            async with asyncio.timeout(READY_S):
                await self._settled.wait()
        except TimeoutError as error:
            raise Unavailable(f"the fork server was not ready within {READY_S:.0f} s; see the node's log") from error
        if self._why:
            text = f"the fork server has ended {self._stillborn} times before it was ready: {self._why}"
            raise Unavailable(text)

    async def spawn(self, name: str, sock: socket.socket, stdout: int, stderr: int) -> Born:
        """Fork one worker that gets these three.

        Raises ``Unavailable`` as ``ready`` does, after SPAWN_S more, and when the fork server ended.
        """
        await self.ready()
        if self._wire is None:  # it ended between getting ready and our turn
            raise Unavailable("the fork server has just ended")
        birth: asyncio.Future[Born] = asyncio.get_running_loop().create_future()
        self._births[name] = birth
        try:
            self._wire.send(codec.pack(ToZygote(Spawn(sandbox=name))), [sock.fileno(), stdout, stderr])
            async with asyncio.timeout(SPAWN_S):
                return await birth
        except TimeoutError as error:
            raise Unavailable(f"the fork server made no worker within {SPAWN_S:g} s") from error
        finally:
            self._births.pop(name, None)
            if birth.done() and not birth.cancelled() and sys.exc_info()[0] is not None and not birth.exception():
                os.close(birth.result().pidfd)  # it came in the moment we gave up

    def started(self, name: str) -> None:
        """The worker's instance is ready. A fork server that has just ended does not need to know."""
        if self._wire is not None:
            with contextlib.suppress(Unavailable):
                self._wire.send(codec.pack(ToZygote(Started(sandbox=name))))

    async def run(self) -> None:
        """Keep a fork server running until cancelled; then it and all its workers are killed."""
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._life()
            except (SllmError, OSError) as error:
                log.error("fork server: %s", error)
                self._count(error)
            failures = 0 if loop.time() - began > 60.0 else failures + 1
            delay = BACKOFF_S[min(failures, len(BACKOFF_S)) - 1] if failures else 0.0
            log.warning("the fork server ended and is started again in %.1f s", delay)
            await asyncio.sleep(delay)

    def _count(self, error: Exception) -> None:
        self._stillborn += 1
        if self._stillborn >= STILLBORN:
            self._why = str(error)
            self._settled.set()

    async def _life(self) -> None:
        ours, theirs = socket.socketpair()
        wire = AsyncWire(ours)
        self._kills = oom_kills.nearest()
        try:
            number = str(theirs.fileno())
            # In a namespace of its own the fork server's parent has number 0.
            words = (*self._namespace, "env", f"{PARENT}=0") if self._namespace else ()
            self._child = Child(
                name="fork server",
                argv=(*words, *self._argv, "--fd", number),
                env=self._env,
                pass_fds=(theirs.fileno(),),
            )
            await self._child.start()
            theirs.close()
            self._wire = wire
            await self._listen(wire)
        finally:
            if not self._why:
                self._settled.clear()
            self._wire = None
            theirs.close()
            wire.close()
            for birth in self._births.values():
                if not birth.done():
                    birth.set_exception(Unavailable("the fork server ended"))
            if self._child is not None and self._child.process is not None:
                await self._child.end()
            self._child = None
            self._on_end()

    def _born(self, sandbox: str, wire: AsyncWire) -> None:
        """A worker whom nobody waits for ends by itself: its socket is closed."""
        birth = self._births.get(sandbox)
        waited_for = birth if birth is not None and not birth.done() else None
        try:
            (pidfd,) = wire.fds.take(1)
        except ProtocolError:  # no descriptor was left here: the kernel has dropped it
            if waited_for is not None:
                waited_for.set_exception(Unavailable("a worker's process cannot be held: no descriptor is left"))
            return
        if waited_for is None:
            os.close(pidfd)
        else:
            waited_for.set_result(Born(pidfd))

    def _end(self) -> str:
        """Why it ended before it was ready. What is killed has no last words, and ``unshare`` speaks of its own."""
        if oom_kills.nearest() > self._kills:
            return (
                "it ended before it was ready, most likely killed by the kernel, which has killed for lack of memory "
                "meanwhile: give this machine, or the container that the node is in, more"
            )
        return "it ended before it was ready; its last words are in the node's log"

    def _unborn(self, told: Unborn) -> None:
        birth = self._births.get(told.sandbox)
        if birth is not None and not birth.done():
            birth.set_exception(Unavailable(f"this machine gives the fork server no process for a worker: {told.why}"))

    async def _listen(self, wire: AsyncWire) -> None:
        try:
            async with asyncio.timeout(READY_S):
                first = await wire.receive()
        except TimeoutError as error:
            raise Unavailable(f"it was not ready within {READY_S:.0f} s") from error
        if first is None:
            raise Unavailable(self._end())
        hello = codec.unpack(FromZygote, first).body
        if not isinstance(hello, ZygoteReady):
            raise ProtocolError(f"its first message is {type(hello).__name__}")
        self.python = hello.python
        log.info("fork server is ready: Python %s, %.2f s of imports", hello.python, hello.import_s)
        self._why, self._stillborn = "", 0
        self._settled.set()
        while (payload := await wire.receive()) is not None:
            body = codec.unpack(FromZygote, payload).body
            if isinstance(body, Spawned):
                self._born(body.sandbox, wire)
            elif isinstance(body, Unborn):
                self._unborn(body)
            elif isinstance(body, Exited):
                self._on_exit(body.sandbox, body)
            elif isinstance(body, Complete):
                self._on_complete()
