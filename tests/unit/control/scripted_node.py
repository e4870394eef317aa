"""A node for the controller's tests: a real NATS client with a node's rights that speaks ``protocol.node``.

It has no sandbox; ``behave`` says what becomes of an instance.
"""

import asyncio
import hashlib
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgspec

from sllm_runtime.platform import trace
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol.errors import ErrorBody, SllmError, StaleTerm
from sllm_runtime.protocol.node import (
    Gpu,
    InstanceStatus,
    KeepModels,
    ModelCommand,
    NodeStatus,
    Ok,
    PrepareModel,
    PrepareReply,
    Progress,
    PullModel,
    StartInstance,
    StopInstance,
    Storage,
)
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.states import INSTANCE, InstanceState, final
from sllm_runtime.protocol.subjects import node_command, status
from sllm_runtime.protocol.timeline import Span

REPORT_S = 0.2
SPANS = (Span("sandbox", 0.0, 2.0), Span("weights", 2.0, 3.0))


def digest_of(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


class ScriptedNode:
    """``async with ScriptedNode(bus, "n1") as node``. Commands it got are in ``starts``, ``stops``, ``prepares``."""

    def __init__(self, bus: Bus, name: str, *, gpus: tuple[Gpu, ...] = (), cpu: float = 8.0) -> None:
        self.bus, self.name = bus, name
        self.boot = uuid.uuid4().hex
        self.cpu, self.memory = cpu, 16 * 2**30
        self.gpus = gpus
        self.python = "3.11"
        self.starts: list[StartInstance] = []
        self.traces: list[str] = []
        """Of ``starts``."""
        self.stops: list[StopInstance] = []
        self.prepares: list[PrepareModel] = []
        self.commands: list[ModelCommand] = []
        self.instances: dict[str, InstanceStatus] = {}
        self.models: tuple[str, ...] = ()
        self.remote: tuple[str, ...] = ()
        self.copied: dict[str, int] = {}
        self.storage: Storage | None = None
        self.untold = 0
        self.pulls: list[str] = []
        self.kept: tuple[str, ...] | None = None
        self.pulled = asyncio.Event()
        """Until it is set, pulls go on."""
        self.prepared = asyncio.Event()
        """Until it is set, preparations go on."""
        self.stuck: set[str] = set()
        """Models of which no more comes."""
        self.pulled.set()
        self.prepared.set()
        self.refuse: SllmError | None = None
        """Raised to every start."""
        self.problem: SllmError | None = None
        """Raised to every preparation and check of a model."""
        self.behave: Callable[[StartInstance], ErrorBody | InstanceState] = lambda command: InstanceState.READY
        """State a new instance goes to at once, or the error it fails with."""
        self.silent = False
        self._term = 0
        self._sequence = 0
        self._held: dict[str, StartInstance] = {}
        self._served: list[Subscription] = []
        self._reports: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "ScriptedNode":
        await self.join()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()

    async def join(self) -> None:
        commands: tuple[tuple[str, type[Any], Callable[[Any], Awaitable[Any]]], ...] = (
            ("start", StartInstance, self._start),
            ("stop", StopInstance, self._stop),
            ("prepare", PrepareModel, self._prepare),
            ("model", ModelCommand, self._model),
            ("pull", PullModel, self._pull),
            ("keep", KeepModels, self._keep),
        )
        for verb, type_, handler in commands:
            self._served.append(await self.bus.serve(node_command(self.name, verb), type_, handler))
        self._reports = asyncio.create_task(self._report())

    async def leave(self) -> None:
        """Speak no more, and listen to nothing. Repeatable."""
        assert self._reports is not None
        self._reports.cancel()
        with suppress(asyncio.CancelledError):
            await self._reports
        for subscription in self._served:
            await subscription.unsubscribe()
        self._served.clear()

    # --- what the test does to it -------------------------------------------------------------------
    @property
    def held(self) -> list[StartInstance]:
        """Instances that have not ended."""
        return list(self._held.values())

    def restart(self) -> None:
        """A new life: nothing of the old one is left."""
        self.boot, self._sequence = uuid.uuid4().hex, 0
        self.instances, self._held = {}, {}
        self.tell()

    def put(self, instance: str, state: InstanceState, **fields: object) -> None:
        """Set an instance's state and report it."""
        self.instances[instance] = msgspec.structs.replace(self.instances[instance], state=state, **fields)
        if final(INSTANCE, state):
            self._held.pop(instance, None)
        self.tell()

    def tell(self) -> None:
        """Report now."""
        if self.silent or not self.bus.connected:
            return
        self._sequence += 1
        held = self._held.values()
        taken = {index: command.instance for command in held for index in command.gpus}
        self.bus.publish_now(
            status(self.name),
            NodeStatus(
                node=self.name,
                boot=self.boot,
                sequence=self._sequence,
                term=self._term,
                cpu=self.cpu,
                memory=self.memory,
                free_cpu=self.cpu - sum(command.manifest.cpu for command in held),
                free_memory=self.memory - sum(command.manifest.memory for command in held),
                gpus=tuple(msgspec.structs.replace(gpu, used_by=taken.get(gpu.index)) for gpu in self.gpus),
                pool_idle=1,
                python=self.python,
                models=self.models,
                remote=tuple(digest for digest in self.remote if digest not in self.copied),
                copied=self.copied,
                storage=self.storage,
                untold=self.untold,
                instances=tuple(self.instances.values()),
            ),
        )

    async def _report(self) -> None:
        while True:
            self.tell()
            await asyncio.sleep(REPORT_S)

    # --- commands -----------------------------------------------------------------------------------
    def _obey(self, term: int) -> None:
        if term < self._term:
            raise StaleTerm(f"node {self.name} obeys term {self._term}, not {term}")
        self._term = term

    async def _start(self, command: StartInstance) -> Ok:
        self._obey(command.term)
        self.starts.append(command)
        self.traces.append(trace.current())
        if self.refuse is not None:
            raise self.refuse
        if command.instance in self.instances:
            return Ok()
        self._held[command.instance] = command
        self.instances[command.instance] = InstanceStatus(
            instance=command.instance,
            function=command.function,
            version=command.version,
            state=InstanceState.STARTING,
            content=command.content,
            progress=Progress(stage="weights", done=1, total=2),
        )
        outcome = self.behave(command)
        if isinstance(outcome, ErrorBody):
            self.put(command.instance, InstanceState.FAILED, error=outcome)
        else:
            self.put(command.instance, outcome, fingerprint="cpu", capabilities=("engine:cpu",), spans=SPANS)
        return Ok()

    async def _stop(self, command: StopInstance) -> Ok:
        self._obey(command.term)
        self.stops.append(command)
        there = self.instances.get(command.instance)
        if there is None or final(INSTANCE, there.state):
            return Ok(note="not here")
        busy = there.running and command.grace_s > 0
        self.put(command.instance, InstanceState.DRAINING if busy else InstanceState.STOPPED)
        return Ok()

    async def _prepare(self, command: PrepareModel) -> PrepareReply:
        self._obey(command.term)
        self.prepares.append(command)
        if self.problem is not None:
            raise self.problem
        if not self.prepared.is_set():
            await asyncio.sleep(0.02)
            return PrepareReply(progress=Progress(stage="convert", done=1, total=2))
        digest = digest_of(command.uri)
        self.models = tuple({*self.models, digest})
        self.tell()
        record = ModelRecord(
            digest=digest,
            uri=command.uri,
            nbytes=2**20,
            partitions=(2**20,),
            sources=(command.uri,),
            adapter="base" if command.uri.startswith("/adapters/") else "",
        )
        return PrepareReply(model=record)

    async def _pull(self, command: PullModel) -> PrepareReply:
        self._obey(command.term)
        self.pulls.append(command.model.digest)
        if self.problem is not None:
            raise self.problem
        if not self.pulled.is_set() or command.model.digest in self.stuck:
            await asyncio.sleep(0.02)
            return PrepareReply(progress=Progress(stage="copy", done=1, total=command.model.nbytes))
        self.copied = {**self.copied, command.model.digest: command.model.nbytes}
        self.models = tuple({*self.models, command.model.digest})
        self.tell()
        return PrepareReply(model=command.model)

    async def _keep(self, command: KeepModels) -> Ok:
        self._obey(command.term)
        self.kept = command.models
        return Ok()

    async def _model(self, command: ModelCommand) -> Ok:
        self._obey(command.term)
        self.commands.append(command)
        if self.problem is not None:
            raise self.problem
        if command.verb == "delete":
            self.models = tuple(digest for digest in self.models if digest != command.digest)
            self.tell()
        return Ok()
