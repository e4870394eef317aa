"""One node, put together: what it has, what it serves on the bus, in which order it begins and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from functools import partial
from typing import Final

import msgspec

from sllm_invoker import machine, old_logs, pressure
from sllm_invoker.admission import Ledger
from sllm_invoker.bundle_parts import BundleReader
from sllm_invoker.bundles import BundleCache
from sllm_invoker.gateway_link import BusLine
from sllm_invoker.instances import Instances
from sllm_invoker.loader import Loader
from sllm_invoker.logs import LogSink
from sllm_invoker.models import Models
from sllm_invoker.namesake import LISTENS_S, Namesake
from sllm_invoker.pools import WarmPools
from sllm_invoker.preparation import Images, Suppliers
from sllm_invoker.proofs import Proofs
from sllm_invoker.relay import Relay
from sllm_invoker.report import Reporter
from sllm_invoker.sandbox import SandboxDriver
from sllm_invoker.settings import InvokerSettings
from sllm_invoker.storage import coming, copied, dram_used, path_loads, remote, resident, storage
from sllm_invoker.workdir import Workdirs
from sllm_runtime.platform import bundles
from sllm_runtime.platform.announce import Announcer
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.presence import Presence
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.ctl import Reply
from sllm_runtime.protocol.errors import SllmError, StaleTerm
from sllm_runtime.protocol.events import Kind, LogRecord
from sllm_runtime.protocol.frames import Open, ToGateway, ToNode
from sllm_runtime.protocol.node import (
    KeepModels,
    ModelCommand,
    NodeStatus,
    Ok,
    PrepareModel,
    PrepareReply,
    PullModel,
    StartInstance,
    StopInstance,
)
from sllm_runtime.protocol.records import Term
from sllm_runtime.protocol.worker import KERNELS, PRELOAD, PRIVATE

log = logging.getLogger(__name__)

TICK_S: Final = 0.1
BEGUN_S: Final = 60.0
"""A node has begun when its warm pool was filled, and at the latest after this."""
_KEPT: Final = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "LANGUAGE", "TZ", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
_KEPT_PREFIXES: Final = ("LC_", "PYTHON", "OMP_", "MKL_", "OPENBLAS_", "CUDA_", "NVIDIA_", "SSL_CERT_")


def sandbox_environment(environment: Mapping[str, str], settings: InvokerSettings) -> dict[str, str]:
    """What functions see of the daemon's environment: where programs and libraries are, and no secret of anyone.

    Temporary files of the fork server lie below the node's data; an instance's own in its work directory.
    """
    kept = {key: value for key, value in environment.items() if key in _KEPT or key.startswith(_KEPT_PREFIXES)}
    own = {"SLLM_NODE": settings.node, "TMPDIR": str(settings.data_dir / "tmp")}
    own[KERNELS] = str(settings.data_dir / "kernels")
    return {**kept, **own, PRIVATE: settings.hidden().to_json(), PRELOAD: settings.preload}


class Node:
    """The invoker of one node. ``run`` is its life."""

    def __init__(
        self, settings: InvokerSettings, bus: Bus, driver: SandboxDriver, images: Images | None = None
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._driver = driver
        self._drivers = ("process",) if images is None else ("container",)
        self._node = settings.node
        self._boot, self._since = uuid.uuid4().hex, time.time()
        self._term = 0
        self._tasks = Tasks(f"node {settings.node}", self._failed)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        clock = time.monotonic
        self._announcer = Announcer(bus, "node", clock, time.time)
        self._outages = 0
        """How often NATS has gone away."""
        self._heard = asyncio.Event()
        """Set while it is there."""
        self._heard.set()
        self._started = self._loader_there = False
        self._labels = machine.parse_labels(settings.labels)
        self._reporter = Reporter(self._compose, self._publish_status)
        self._loader = Loader(settings.loaderd_socket, self._storage_changed)
        self._pool = WarmPools(
            driver,
            settings.pool_size,
            kinds=settings.pool_kinds,
            refill_delay_s=settings.refill_delay,
            on_change=self._reporter.changed,
        )
        fetch = partial(bundles.fetch, BundleReader(bus, self._node).part)
        self._bundles = BundleCache(settings.data_dir / "bundles", fetch, settings.bundle_cache)
        self._workdirs = Workdirs(settings.data_dir / "work")
        self._logs = settings.data_dir / "logs"
        self._sink = LogSink(self._logs, self._publish_log)
        self._models = Models(self._loader, time.time)
        self._relay = Relay(
            lambda name: self._instances.find(name),
            lambda gateway: BusLine(bus, subjects.frames(gateway, self._node)),
            clock,
            self._tasks,
            yielded=self._reporter.changed,
            moves=self._pool.rest,
        )
        self._namesake = Namesake(settings.node, self._boot, self._since, clock, self._failed)
        self._presence = Presence(
            bus,
            lambda gateway: subjects.frames(gateway, self._node),
            ToGateway(()),
            self._relay.overdue,
            self._relay.on_left,
            clock,
        )
        self._instances = Instances(
            self._node,
            self._ledger(),
            Suppliers(
                self._pool, self._bundles, self._loader, self._workdirs, Proofs(settings.data_dir / "proofs"), images
            ),
            self._sink,
            ready=self._relay.ready,
            consumed=self._relay.consumed,
            moved=self._reporter.moved,
            changed=self._reporter.changed,
            counted=self._reporter.counted,
            clock=clock,
            wall=time.time,
        )

    def _ledger(self) -> Ledger:
        settings = self._settings
        gpus = machine.nvidia_gpus() if settings.gpus is None else machine.parse_gpus(settings.gpus)
        return Ledger(
            cpu=settings.cpu or machine.cores(),
            memory=settings.memory or machine.memory(),
            gpus=gpus,
            cpu_overcommit=settings.cpu_overcommit,
        )

    # --- life ---------------------------------------------------------------------------------------
    async def run(self, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
        """Serve until ``stop``; then end everything this node made. Raises what broke a part of it."""
        async with AsyncExitStack() as stack:
            self._workdirs.reset()
            Workdirs(self._settings.data_dir / "tmp").reset()
            self._bundles.reset()
            stack.callback(self._sink.close)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(self._loader.close)
            stack.push_async_callback(self._driver.close)
            stack.callback(self._bus.on_disconnect(self._gone))
            stack.callback(self._bus.on_reconnect(self._heard.set))
            self._tasks.start(self._listen(), "namesake")
            await self._driver.start()
            for name, work in (
                ("loader", self._loader.run()),
                ("logs", self._sink.run()),
                ("old logs", old_logs.keep_within(self._logs, lambda: self._instances.functions | self._sink.writing)),
                ("pool", self._pool.run()),
                ("begin", self._begin()),
                ("memory", pressure.watch(machine.available, self._settings.pool_floor, self._pool.press)),
                ("ticks", self._tick()),
            ):
                self._tasks.start(work, name)
            stack.push_async_callback(self._end)
            await self._loader.there(self._settings.loader_wait)
            stopped = self._tasks.start(_wait(stop), "stop")
            await self._look(stopped)
            if self._failure.done():
                self._failure.result()
            if stop.is_set():
                return
            self._namesake.takes_part = True
            await self._serve(stack)
            stack.push_async_callback(self._presence.close)
            self._presence.start()
            self._tasks.start(self._reporter.run(), "report")
            on_ready()
            self._announcer.tell(Kind.NODE_STARTED, f"life {self._boot}", node=self._node)
            self._started = True
            self._tell_loader()
            await asyncio.wait({stopped, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if not self._failure.done():
                await self._leave()
        if self._failure.done():
            self._failure.result()

    async def _leave(self) -> None:
        """Everything goes on but new starts, while what runs here has time to go elsewhere or to end."""
        seconds = self._settings.node_drain
        if seconds:
            self._announcer.tell(Kind.NODE_DRAINING, f"at most {seconds:g} s", node=self._node)
            await self._instances.leave(seconds)

    async def _end(self) -> None:
        """Instances first: their callers are told before the bus is closed."""
        speaks = self._namesake.takes_part and not self._namesake.goes
        if speaks:
            self._announcer.tell(Kind.NODE_STOPPING, f"{len(self._instances)} instance(s) end", node=self._node)
        await self._instances.close()
        await self._models.close()
        await self._bundles.close()
        await self._pool.close()
        try:
            await self._relay.flush()
            if speaks:  # else whoever has this name has it still
                await self._reporter.send()
        except SllmError as error:
            log.info("last words were not sent: %s", error.message)

    def _failed(self, error: BaseException) -> None:
        """A part that must run for ever has failed: let it crash, the supervisor starts this node anew."""
        if not self._failure.done():
            self._failure.set_exception(error)

    def _gone(self) -> None:
        self._outages += 1
        self._heard.clear()

    async def _look(self, stopped: asyncio.Task[None]) -> None:
        """Until whoever lives under this name would have been heard, or this one is to end: while NATS is away nobody
        is."""
        while not (self._failure.done() or stopped.done()):
            before = self._outages
            await self._namesake.sought(self._settings.name_wait)
            if not self._settings.name_wait or (self._heard.is_set() and self._outages == before):
                return
            there = self._tasks.start(_wait(self._heard), "NATS is there")
            await asyncio.wait({there, stopped, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            there.cancel()

    async def _listen(self) -> None:
        """Two of one name are found as one of them begins, mostly before it takes part."""
        try:
            reports = await self._bus.subscribe(subjects.status(self._node), NodeStatus, self._namesake.heard)
        finally:
            self._namesake.listens()  # or it has failed: who waits for that looks
        try:
            before = -1
            while before != self._outages or not self._namesake.takes_part:  # ``_look`` hears by this
                await self._heard.wait()  # nobody is heard while NATS is away, however long that is
                before = self._outages
                await asyncio.sleep(LISTENS_S)
        finally:
            await reports.unsubscribe()

    async def _begin(self) -> None:
        """Once the first sandboxes wait: how fast the disk is cannot be found out while they are made."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(BEGUN_S):
                await self._pool.filled()
        self._loader.begun()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._relay.tick(self._bus.heard)
            self._instances.tick()

    # --- the bus --------------------------------------------------------------------------------------
    async def _serve(self, stack: AsyncExitStack) -> None:
        bus, node = self._bus, self._node
        stack.callback(bus.on_disconnect(self._relay.on_disconnect))
        stack.callback(bus.on_reconnect(self._reconnected))
        for subscription in (
            await bus.listen(subjects.node_calls(node, "x")[:-1] + "*", self._on_calls),
            await bus.listen(subjects.node_open(node, "x")[:-1] + "*", self._on_open),
            await bus.serve(subjects.node_command(node, "start"), StartInstance, self._on_start),
            await bus.serve(subjects.node_command(node, "stop"), StopInstance, self._on_stop),
            await bus.serve(subjects.node_command(node, "prepare"), PrepareModel, self._on_prepare),
            await bus.serve(subjects.node_command(node, "model"), ModelCommand, self._on_model),
            await bus.serve(subjects.node_command(node, "pull"), PullModel, self._on_pull),
            await bus.serve(subjects.node_command(node, "keep"), KeepModels, self._on_keep),
            await bus.subscribe(subjects.LEADER, Term, self._on_leader),
        ):
            stack.push_async_callback(subscription.unsubscribe)
        await bus.flush()

    def _reconnected(self) -> None:
        self._relay.on_reconnect()
        self._reporter.changed()

    def _on_calls(self, subject: str, _reply: str, data: bytes) -> None:
        self._relay.on_message(subject.rpartition(".")[2], codec.unpack(ToNode, data))

    def _on_open(self, subject: str, reply_to: str, data: bytes) -> None:
        """An own answer instead of ``Bus.serve``: the gateway's name stands in the subject, and no task is needed."""
        try:
            opened = self._relay.open(subject.rpartition(".")[2], codec.unpack(Open, data))
            reply = Reply(value=msgspec.Raw(codec.pack(opened)))
            self._reporter.counted()
        except SllmError as error:
            reply = Reply(error=error.body())
        if reply_to:
            self._bus.publish_now(reply_to, reply)

    async def _publish_status(self, status: NodeStatus) -> None:
        if self._namesake.goes:  # each would be the end of what the other one runs
            return
        self._bus.publish_now(subjects.status(self._node), status)

    async def _publish_log(self, record: LogRecord) -> None:
        await self._bus.publish(subjects.logs(self._node, record.function), record)

    # --- commands ---------------------------------------------------------------------------------------
    def _obey(self, term: int) -> None:
        """Raises ``StaleTerm`` for a controller that was deposed."""
        if term < self._term:
            raise StaleTerm(f"node {self._node} obeys term {self._term}; this command is of term {term}")
        self._term = term

    def _on_leader(self, leads: Term, _subject: str) -> None:
        """Obeyed from now on, also before its first command; it hears at once how things stand here."""
        if leads.term > self._term:
            self._term = leads.term
            self._reporter.changed()

    async def _on_start(self, order: StartInstance) -> Ok:
        self._obey(order.term)
        return Ok(note=self._instances.start(order))

    async def _on_stop(self, order: StopInstance) -> Ok:
        self._obey(order.term)
        return Ok(note=self._instances.stop(order.instance, order.reason, order.grace_s, resume=order.resume))

    async def _on_prepare(self, request: PrepareModel) -> PrepareReply:
        self._obey(request.term)
        return await self._models.prepare(request)

    async def _on_pull(self, request: PullModel) -> PrepareReply:
        self._obey(request.term)
        return await self._models.pull(request)

    async def _on_keep(self, order: KeepModels) -> Ok:
        self._obey(order.term)
        return await self._loader.keep(order.models)

    async def _on_model(self, request: ModelCommand) -> Ok:
        self._obey(request.term)
        return await self._models.command(request)

    def _storage_changed(self) -> None:
        if self._loader.status is not None:  # while it is away its pool is as it was
            self._instances.reserve(self._loader.status.pool.limit)
        self._tell_loader()
        self._reporter.changed()

    def _tell_loader(self) -> None:
        """Nothing before this life is told of, which it may never be (``namesake``)."""
        there = self._loader.status is not None
        if self._started and there != self._loader_there:
            self._loader_there = there
            self._announcer.tell(Kind.LOADER_CONNECTED if there else Kind.LOADER_LOST, node=self._node)

    # --- report -----------------------------------------------------------------------------------------
    def _compose(self, sequence: int) -> NodeStatus:
        ledger, loader = self._instances.ledger, self._loader.status
        return NodeStatus(
            node=self._node,
            boot=self._boot,
            since=self._since,
            sequence=sequence,
            term=self._term,
            cpu=ledger.cpu,
            memory=ledger.offered_memory,
            free_cpu=ledger.free_cpu,
            left_cpu=ledger.left_cpu,
            free_memory=max(0, ledger.free_memory),
            gpus=ledger.held_gpus,
            labels=self._labels,
            draining=self._instances.draining,
            pool_idle=self._pool.idle,
            sandbox_s=self._pool.made_s,
            models=loader.models if loader is not None else (),
            resident=resident(loader) if loader is not None else (),
            remote=remote(loader) if loader is not None else (),
            copied=copied(loader) if loader is not None else {},
            untold=loader.untold if loader is not None else 0,
            paths=path_loads(loader) if loader is not None else (),
            coming=coming(self._instances.starting, self._loader.shown, loader),
            dram_limit=loader.pool.limit if loader is not None else 0,
            dram_used=dram_used(loader) if loader is not None else 0,
            storage=storage(loader) if loader is not None else None,
            python=".".join(self._driver.python.split(".")[:2]),
            drivers=self._drivers,
            condition=self._driver.problem,
            instances=self._instances.statuses(),
            shared=ledger.shared,
        )


async def _wait(event: asyncio.Event) -> None:
    await event.wait()
