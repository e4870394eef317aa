"""``sllm up``: one process that starts the platform, keeps it running and takes it down with itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping

from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.chronicle import Chronicle
from sllm_runtime.platform.daemon import ready
from sllm_runtime.platform.disk import DiskWatch, free, require_room
from sllm_runtime.platform.lifetime import Stop, keep, reap
from sllm_runtime.platform.listening import bound, is_nobodys
from sllm_runtime.platform.local import (
    CONTROLLER,
    METRICS_PORT,
    NATS,
    UP,
    Layout,
    Options,
    drain_s,
    metrics_ports,
    prepare,
    reached,
    specs,
)
from sllm_runtime.platform.nats_server import LEAST_STORE, EmbeddedNats
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.process import become_subreaper, end_orphans, start_time, tail
from sllm_runtime.platform.profile import answers_alive, claim, release
from sllm_runtime.platform.running import Lock, Running
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.spawned import end_all, spawned
from sllm_runtime.platform.supervise import Supervisor
from sllm_runtime.protocol.errors import Conflict, InvalidRequest, SllmError, StartFailed
from sllm_runtime.protocol.quantities import show_bytes

log = logging.getLogger(__name__)

_READY_S = 30.0
_NEXT_S = 0.25
"""An address that does not answer is waited for so long before the name's next one is tried beside it."""
"""To one on this machine."""
_STOP_S = 15.0
_POOL_S = 8.0
"""What the nodes have that a controller has started, beyond which they are killed."""
_POLL_S = 0.02

Report = Callable[[str], None]


class Platform:
    """The platform of one machine. ``await run()`` is its whole life."""

    def __init__(self, options: Options, environment: Mapping[str, str], report: Report) -> None:
        self.options = options
        self.layout = Layout(options.data)
        self.token = token(environment)
        self._environment = environment
        self._report = report
        self._supervisor: Supervisor | None = None
        self._nats_url = options.nats_url or ""
        self._profile, self._claimed = options.profile, False
        self._tasks = Tasks("up")
        self._lifetime = Stop()
        self.began = time.monotonic()

    async def run(self, on_ready: Callable[[Running], None]) -> int:
        """Start, call ``on_ready``, wait for a signal or for a child that cannot be kept, stop. The exit status.

        Raises ``Conflict`` if the data directory or a port is in use, ``InvalidRequest`` for a setting,
        ``StartFailed``, ``Unavailable``.
        """
        drain_s(self._environment)
        with Lock(self.options.data) as lock, self._lifetime.heard():
            for port in self.options.ports:  # behind the lock: of one that runs here already they are taken
                require_port(self.options.host, port)
            for port in metrics_ports(self.options, self._environment):
                require_port(self.options.host, port, METRICS_PORT)
            become_subreaper()
            try:
                await self._until_stopped(lock, on_ready)
            finally:
                await self._stop()
        return self._lifetime.status

    async def _until_stopped(self, lock: Lock, on_ready: Callable[[Running], None]) -> None:
        server = prepare(self.options, self.layout, self.token)
        if server is not None:
            self._nats_url = server.url
        else:
            await self._try_cluster()
        self._supervisor = supervisor = self._supervise(server, lock)

        async def started() -> None:
            await self._claim_profile()
            lock.write(self._running())
            on_ready(self._running())
            ready()

        await keep(supervisor, self._lifetime, self._start(supervisor), started)

    def _supervise(self, server: EmbeddedNats | None, lock: Lock) -> Supervisor:
        """The keeper of everything that runs, and what looks on; nothing is started yet."""
        chronicle = Chronicle(lambda: self._connect(UP, jetstream=False))
        supervisor = Supervisor(
            specs(self.options, self.layout, server, self._environment),
            changed=lambda: lock.changed(self._running()),
            restarted=chronicle.restarted,
        )
        self._tasks.start(reap(supervisor, self._pool_pids), "orphans")
        self._tasks.start(chronicle.run(), "chronicle")
        if server is not None:

            async def again() -> None:
                chronicle.because(NATS, f"the disk of {server.directory} was full and has space again")
                await supervisor.restart(NATS)

            self._tasks.start(DiskWatch(server.directory, server.log_file, again).run(), "disk")
        return supervisor

    async def _start(self, supervisor: Supervisor) -> None:
        self._report("starting NATS, controller, nodes and gateways")
        await supervisor.start()
        deadline = time.monotonic() + _READY_S
        for name, port in zip(self.options.gateway_names, self.options.ports, strict=True):
            while not await answers_ready(self.options.host, port, max(_POLL_S, deadline - time.monotonic())):
                if time.monotonic() > deadline:
                    end = tail(self.layout.log(f"gateway-{name}"))
                    raise StartFailed(f"gateway {name} does not answer /readyz on port {port}; its log ends:\n{end}")
                await asyncio.sleep(_POLL_S)

    async def _claim_profile(self) -> None:
        """Another platform keeps its own, as ``free_name`` says."""
        options = self.options
        wanted = (options.home, options.profile, options.url, self.token, options.data, answers_alive, options.urls)
        self._profile, self._claimed = await asyncio.to_thread(claim, *wanted), True

    async def _try_cluster(self) -> None:
        """One clear error now rather than one from each daemon."""
        self._report(f"connecting to {self.options.nats_url}")
        await (await self._connect(CONTROLLER)).close()

    async def _connect(self, identity: str, *, jetstream: bool = True) -> Bus:
        own = {"SLLM_NATS_URL": self._nats_url, "SLLM_IDENTITY_FILE": str(self.layout.identity_file(identity))}
        settings = Settings.load({**self._environment, **own})
        return await Bus.connect(settings, identity, name="sllm up", jetstream=jetstream)

    def _running(self) -> Running:
        return Running(
            pid=os.getpid(),
            started=start_time(os.getpid()),
            url=self.options.url,
            urls=self.options.urls,
            profile=self._profile,
            nats_url=self._nats_url,
            data=str(self.options.data),
            stop_s=_STOP_S + drain_s(self._environment),
            pids=self._supervisor.pids() if self._supervisor else {},
            notes=self._supervisor.notes() if self._supervisor else {},
        )

    def _pool_pids(self) -> set[int]:
        return {each.pid for each in spawned(self.layout.pool).values()} if self.options.pool else set()

    async def _stop(self) -> None:
        self._report("stopping")
        if self._supervisor is not None:
            await self._supervisor.stop()
        if self.options.pool:
            await end_all(self.layout.pool, _POOL_S)
        await self._tasks.close()
        end_orphans(set())
        shutil.rmtree(self.layout.far_sockets, ignore_errors=True)
        if self._claimed:
            with contextlib.suppress(SllmError, OSError):
                await asyncio.to_thread(release, self.options.home, self._profile, self.options.url, self.token)


def token(environment: Mapping[str, str]) -> str:
    """``SLLM_TOKEN``, else a fresh one. Raises ``InvalidRequest`` for one that no client could send."""
    said = environment.get("SLLM_TOKEN") or secrets.token_urlsafe(32)
    said = said.strip()  # of a file's last line end gateways take no notice either
    if not (said and said.isascii() and said.isprintable()):
        text = "SLLM_TOKEN holds a line end or another character that no token has (printable ASCII only), or nothing"
        raise InvalidRequest(text, field="SLLM_TOKEN")
    return said


def require_disk(options: Options) -> str:
    """Raise ``Unavailable`` where the embedded server has no room; a warning where it may run out of it, or ""."""
    if options.nats_url:
        return ""
    require_room(options.data)
    left = free(options.data)
    if left >= LEAST_STORE:
        return ""
    return (
        f"the disk of {options.data} has {show_bytes(left)} free, the state may grow to {show_bytes(LEAST_STORE)}:"
        " free some space or choose another with --data"
    )


def require_port(host: str, port: int, setting: str = "--port") -> None:
    """Raise ``Conflict`` if nothing new can listen on ``host:port``, which ``setting`` says, ``InvalidRequest`` where
    ``host`` is another machine's, or nobody's."""
    if not host:  # which would be any of them, and none that can be asked
        raise InvalidRequest("--host is empty; leave it out, or name an address of this machine", field="host")
    try:
        for probe in bound(host, port):
            probe.close()
    except OSError as error:
        if is_nobodys(error):
            text = f"--host {host!r} is no address of this machine, nor is the first that it stands for as a name"
            text += "; give one that it has by --host or SLLM_HOST"
            raise InvalidRequest(text, field="host") from error
        raise Conflict(f"cannot listen on {host}:{port} ({error.strerror}); choose another with {setting}") from error


async def answers_ready(host: str, port: int, within_s: float) -> bool:
    """Whether the gateway there answers ``GET /readyz`` with 200 within that time, its name's resolution included."""
    try:
        async with asyncio.timeout(within_s):
            reader, writer = await asyncio.open_connection(reached(host), port, happy_eyeballs_delay=_NEXT_S)
            try:
                writer.write(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                return b" 200 " in await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except OSError:  # TimeoutError is one
        return False
