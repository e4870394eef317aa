"""Sandboxes that are processes: forked from the node's fork server, seen by pidfd, killed as a group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from sllm_invoker.fork_server import ZYGOTE, ForkServer, namespace_command
from sllm_invoker.sandbox import PLAIN, Exit, Sandbox, Wish
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.process import KILLED_S
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import ProtocolError, Unavailable
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.worker import Exited, FromWorker, Hello

log = logging.getLogger(__name__)

HELLO_S: Final = 30.0
EXIT_REPORT_S: Final = 5.0
"""The fork server says how a worker ended; it is waited for this long after the worker is known to be dead, unless it
has ended as well. On a loaded machine its turn may come late, and without it nobody can tell why the worker died."""
_SWEEP_S: Final = 0.1
_PID = re.compile(r"^Pid:\s*(-?\d+)$", re.MULTILINE)


def host_pid(pidfd: int) -> int:
    """The pid, as seen from here, of the process behind ``pidfd``; 0 when it is dead."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        found = _PID.search(file.read())
    return max(0, int(found[1])) if found else 0


def _pipe(ours: contextlib.ExitStack, theirs: contextlib.ExitStack) -> tuple[int, int]:
    """Our end and theirs, each closed with its stack."""
    out, end = os.pipe2(os.O_CLOEXEC)
    ours.callback(os.close, out)
    theirs.callback(os.close, end)
    return out, end


class ProcessSandbox:
    """One forked worker. Owns its socket, both pipes and the pidfd."""

    def __init__(self, name: str, wire: AsyncWire, stdout: int, stderr: int, pidfd: int, server: ForkServer) -> None:
        self._name = name
        self._wire = wire
        self._stdout, self._stderr, self._pidfd = stdout, stderr, pidfd
        self._server = server
        self._pid = host_pid(pidfd)
        self._asked = False
        self._closed = False
        self._report: Exited | None = None
        self._no_report = False
        self._loop = asyncio.get_running_loop()
        self._late: asyncio.TimerHandle | None = None
        self._given_up: asyncio.TimerHandle | None = None
        self._exited: asyncio.Future[Exit] = self._loop.create_future()
        self.hello = Hello(pid=0, python="")
        self._loop.add_reader(pidfd, self._dead)

    @property
    def name(self) -> str:
        return self._name

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def python(self) -> str:
        return self.hello.python

    @property
    def home(self) -> str:
        return ""

    @property
    def wire(self) -> AsyncWire:
        return self._wire

    @property
    def stdout(self) -> int:
        return self._stdout

    @property
    def stderr(self) -> int:
        return self._stderr

    @property
    def exited(self) -> asyncio.Future[Exit]:
        return self._exited

    async def confine(self, memory: int, cpu: float) -> None:
        """The worker limits itself."""

    def started(self) -> None:
        """The fork server looks which of its pages the start has touched."""
        self._server.started(self._name)

    def short_of_memory(self) -> bool:
        """Never: a limit of a process refuses at once, and what it has is not taken from it."""
        return False

    def _dead(self) -> None:
        """The pidfd is readable: nothing of this process will run again."""
        self._loop.remove_reader(self._pidfd)
        self._kill_group()  # its children, while the group's number is surely still theirs
        self._pid = 0
        if self._report is not None or self._no_report:
            self._settle()
        else:
            self._late = self._loop.call_later(EXIT_REPORT_S, self._settle)

    def on_report(self, report: Exited) -> None:
        """The fork server has reaped it."""
        self._report = report
        if self._pid == 0:
            self._settle()

    def on_server_end(self) -> None:
        """The fork server has ended: it will not say how this worker ends."""
        self._no_report = True
        if self._pid == 0:
            self._settle()

    def _hangs(self) -> None:
        """Not even SIGKILL has ended it. Whoever waits for its end goes on without."""
        log.error("worker %s (pid %d) has not ended %g s after SIGKILL: given up", self._name, self._pid, KILLED_S)
        self._loop.remove_reader(self._pidfd)
        self._settle()

    def _settle(self) -> None:
        for timer in (self._late, self._given_up):
            if timer is not None:
                timer.cancel()
        if not self._exited.done():
            report = self._report
            if report is None:
                self._exited.set_result(Exit(None, asked=self._asked, orphaned=self._no_report))
            else:
                self._exited.set_result(Exit(report.code, report.signal, self._asked, peak=report.peak))

    def _kill_group(self) -> None:
        if self._pid > 1:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)

    def kill(self) -> None:
        """SIGKILL to the worker and its process group. Repeatable."""
        if self._pid == 0:
            return
        self._asked = True
        if self._given_up is None:
            self._given_up = self._loop.call_later(KILLED_S, self._hangs)
        self._kill_group()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def close(self) -> Exit:
        """Kill what is left, wait for its end (KILLED_S at most), free all descriptors: cancelled, at that end."""
        self.kill()
        try:
            end = await asyncio.shield(self._exited)
        except asyncio.CancelledError:
            self._exited.add_done_callback(lambda _: self._free())
            raise
        self._free()
        return end

    def _free(self) -> None:
        if not self._closed:
            self._closed = True
            self._wire.close()
            for fd in (self._stdout, self._stderr, self._pidfd):
                os.close(fd)


class ProcessDriver:
    """Makes ``ProcessSandbox``es.

    ``argv``: the fork server's command, without ``--fd N``. ``on_end`` is called when a fork server has ended, and
    again and again for KILLED_S: what its workers had started becomes this process's children as each of them ends.
    """

    def __init__(
        self,
        env: Mapping[str, str],
        *,
        argv: Sequence[str] = ZYGOTE,
        isolate: bool = True,
        on_end: Callable[[], object] = lambda: None,
    ) -> None:
        self._env = env
        self._argv = argv
        self._isolate = isolate
        self._on_end = on_end
        self._on_complete: Callable[[], None] = lambda: None
        self._tasks = Tasks("process driver")
        self._server: ForkServer | None = None
        self._living: dict[str, ProcessSandbox] = {}
        self._ended = asyncio.Event()

    @property
    def python(self) -> str:
        """Version of its workers' Python; empty before the first fork server is ready."""
        return self._server.python if self._server is not None else ""

    @property
    def problem(self) -> str:
        """Its fork server is started again at once."""
        return ""

    @property
    def fork_server_pid(self) -> int:
        """0 when none runs."""
        return self._server.pid if self._server is not None else 0

    async def start(self) -> None:
        """Start the fork server; it gets ready in the background."""
        namespace = await namespace_command() if self._isolate else ()
        if not namespace:
            log.warning("no PID namespace for sandboxes here: the fork server ends what its workers leave behind")
        self._server = ForkServer(
            self._env,
            argv=self._argv,
            namespace=namespace,
            on_exit=self._reaped,
            on_complete=lambda: self._on_complete(),
            on_end=self._server_ended,
        )
        self._tasks.start(self._server.run(), "fork server")
        self._tasks.start(self._sweep(), "what fork servers left")

    def serves(self, wish: Wish) -> bool:
        """Workers leave the network by themselves, and see the machine's devices."""
        return True

    def on_complete(self, call: Callable[[], None]) -> None:
        """Its fork server has imported what it did not begin with."""
        self._on_complete = call

    async def ready(self, wish: Wish = PLAIN) -> None:
        """Its fork server is. Raises ``Unavailable``."""
        await self._running.ready()

    async def create(self, name: str, wish: Wish = PLAIN) -> Sandbox:
        """Fork one worker and wait for its ``Hello``. Raises ``Unavailable``."""
        sandbox = await self._fork(self._running, name)
        try:
            async with asyncio.timeout(HELLO_S):
                payload = await sandbox.wire.receive()
            if payload is None:
                raise Unavailable(f"worker {name} ended before it said hello")
            message = codec.unpack(FromWorker, payload)
            if not isinstance(message.body, Hello) or message.version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
                raise Unavailable(f"worker {name} speaks another protocol (version {message.version})")
            sandbox.hello = message.body
        except TimeoutError as error:
            await sandbox.close()
            raise Unavailable(f"worker {name} did not say hello within {HELLO_S:.0f} s") from error
        except ProtocolError as error:
            await sandbox.close()
            raise Unavailable(f"worker {name} speaks another protocol: {error.message}") from error
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    @property
    def _running(self) -> ForkServer:
        if self._server is None:
            raise Unavailable("the process driver was not started")
        return self._server

    async def _fork(self, server: ForkServer, name: str) -> ProcessSandbox:
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:  # each may be the one too many
            wire, end = socket.socketpair()
            ours.callback(wire.close)
            theirs.callback(end.close)
            out, out_end = _pipe(ours, theirs)
            err, err_end = _pipe(ours, theirs)
            born = await server.spawn(name, end, out_end, err_end)
            ours.pop_all()
        os.set_blocking(out, False)
        os.set_blocking(err, False)
        sandbox = ProcessSandbox(name, AsyncWire(wire, max_fds=0), out, err, born.pidfd, server)
        self._living[name] = sandbox
        sandbox.exited.add_done_callback(lambda _future: self._living.pop(name, None))
        return sandbox

    def _reaped(self, name: str, report: Exited) -> None:
        sandbox = self._living.get(name)
        if sandbox is not None:
            sandbox.on_report(report)

    def _server_ended(self) -> None:
        for sandbox in list(self._living.values()):
            sandbox.on_server_end()
        self._ended.set()
        self._look()

    def _look(self) -> None:
        try:
            self._on_end()
        except OSError as error:  # no descriptor is left, or what was left is another user's: the next look goes on
            log.warning("what a fork server left is not ended: %s", error)

    async def _sweep(self) -> None:
        """A worker ends after its fork server, and what it had detached comes to this process only then."""
        loop = asyncio.get_running_loop()
        while True:
            await self._ended.wait()
            self._ended.clear()
            until = loop.time() + KILLED_S
            while loop.time() < until:
                await asyncio.sleep(_SWEEP_S)
                self._look()

    async def close(self) -> None:
        """Kill the fork server and with it every worker."""
        for sandbox in list(self._living.values()):
            sandbox.kill()
        await self._tasks.close()
