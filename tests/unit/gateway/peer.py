"""The other side of a gateway, scripted: a node and a controller that speak the protocol over a real NATS server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from sllm_gateway.app import Gateway, running
from sllm_gateway.server import listen, make_server
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.frames import (
    Ack,
    Beat,
    CallHead,
    Cancel,
    Delta,
    End,
    Feed,
    Frame,
    FrameKind,
    Hold,
    Open,
    Opened,
    Parts,
    Resend,
    Segment,
    ToGateway,
    ToNode,
    ToolDelta,
    Unknown,
    Usage,
)
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus, Storage
from sllm_runtime.protocol.records import Route, RouteEntry
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.stream import Inbox, Outbox
from tests.fixtures.nats import CONTROLLER, GATEWAY, GATEWAY_2, NODE, Nats
from tests.fixtures.waiting import GIVE_UP_S, until

BEAT_S = 0.2
CREATED = 1_700_000_000.5
"""Unix seconds at which versions were made."""


def manifest(name: str, *, streams: bool = True, **fields: Any) -> Manifest:
    """A function of any arguments, unless ``input_schema`` says otherwise."""
    schema = fields.pop("input_schema", {"type": "object"})
    handler = Handler(
        entry=f"m:{name}", kind="generator" if streams else "function", streams=streams, input_schema=schema
    )
    return Manifest(name=name, handler=handler, **{"concurrency": 64, **fields})


def entry(instance: str = "i1", node: str = NODE, version: int = 1, concurrency: int = 64, **fields: Any) -> RouteEntry:
    return RouteEntry(instance=instance, node=node, version=version, concurrency=concurrency, **fields)


@dataclass(eq=False)
class Run:
    """One call at the scripted node."""

    node: "ScriptedNode"
    head: CallHead
    gateway: str
    outbox: Outbox
    inbox: Inbox
    body: bytearray = field(default_factory=bytearray)
    fed: list[Feed] = field(default_factory=list)
    held: bool = False
    """Whether it was told to draw no more."""
    slowed: float = 0.0
    """Seconds from a token to the next at least, as it was told."""
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: Cancel | None = None
    has_body: asyncio.Event = field(default_factory=asyncio.Event)
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def arguments(self) -> Any:
        return msgspec.json.decode(bytes(self.body))

    def out(self, value: Any) -> None:
        """One value of the function."""
        self.outbox.push_value(FrameKind.OUTPUT, msgspec.json.encode(value))
        self.node.flush(self)

    def delta(
        self, text: str, *, choice: int = 0, finish: Any = None, logprobs: Any = (), calls: tuple[ToolDelta, ...] = ()
    ) -> None:
        """One piece of an engine's text."""
        self.outbox.push(FrameKind.DELTA, codec.pack(Delta(choice, text, finish, logprobs, calls)))
        self.node.flush(self)

    def end(
        self,
        error: SllmError | None = None,
        usage: Usage | None = None,
        *,
        unseen: bool = False,
        yielded: bool | None = None,
    ) -> None:
        body = error.body() if error is not None else None
        self.outbox.push(FrameKind.END, codec.pack(End(error=body, usage=usage, unseen=unseen, yielded=yielded)))
        self.node.flush(self)

    async def room(self) -> None:
        """Wait until credit lets frames go again, or the call is cancelled."""
        while self.outbox.blocked and not self.cancelled.is_set():
            self.moved.clear()
            await self.moved.wait()


Script = Callable[[Run], Awaitable[None]]


async def hang(run: Run) -> None:
    """A script that yields one value and goes on until it is cancelled."""
    run.out("begun")
    await run.cancelled.wait()
    run.end()


class ScriptedNode:
    """Takes every call of one gateway (or what ``judge`` says) and runs the script of its function."""

    def __init__(self, bus: Bus, name: str = NODE, gateway: str = GATEWAY) -> None:
        self.bus, self.name, self.gateway = bus, name, gateway
        self.scripts: dict[str, Script] = {}
        self.judge: Callable[[Open], Opened] = lambda _: Opened(status="accepted")
        self.runs: dict[tuple[str, int], Run] = {}
        self.opened: list[Open] = []
        self.cancels: list[Cancel] = []
        self.lose: Callable[[Segment], bool] = lambda _: False
        """Frames that never leave."""
        self.silent = False
        self.mute: Callable[[Any], bool] = lambda _: False
        """Of which calls nothing leaves."""
        self._tasks = Tasks("node")
        self._subscriptions: list[Subscription] = []
        self._sequence = 0

    async def start(self) -> None:
        self._subscriptions = [
            await self.bus.serve(subjects.node_open(self.name, self.gateway), Open, self._open),
            await self.bus.subscribe(subjects.node_calls(self.name, self.gateway), ToNode, self._items),
        ]
        self._tasks.start(self._beats(), "beats")

    async def close(self) -> None:
        await self._tasks.close()
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    async def _open(self, request: Open) -> Opened:
        self.opened.append(request)
        head = request.head
        answer = self.judge(request)
        if answer.status == "accepted" and (head.call, head.epoch) not in self.runs:
            run = Run(self, head, self.gateway, Outbox(head.credit), Inbox())
            self.runs[head.call, head.epoch] = run
            self._take_body(run, request.first)
            self._tasks.start(self._run(run), "run")
        return answer

    async def _run(self, run: Run) -> None:
        await run.has_body.wait()
        await self.scripts[run.head.function](run)

    def _take_body(self, run: Run, frames: tuple[Frame, ...]) -> None:
        now = asyncio.get_running_loop().time()
        for frame in run.inbox.on_frames(frames, now):
            run.body += frame.data
            run.inbox.consume(frame.cost)
        if len(run.body) >= run.head.body_bytes:
            run.has_body.set()
        if (ack := run.inbox.ack(now, force=True)) is not None:
            self.send(Ack(run.head.call, run.head.epoch, *ack))

    def _items(self, message: ToNode, subject: str) -> None:
        for item in message.items:
            run = self.runs.get((item.call, item.epoch))
            if isinstance(item, Cancel):
                self.cancels.append(item)
            if run is None:
                self.send(Unknown(item.call, item.epoch))
            elif isinstance(item, Parts):
                self._take_body(run, item.frames)
            elif isinstance(item, Ack):
                run.outbox.on_ack(item.next_index, item.limit)
                run.moved.set()
                self.flush(run)
            elif isinstance(item, Resend):
                run.outbox.on_resend(item.index)
                self.flush(run)
            elif isinstance(item, Feed):
                run.fed.append(item)
                run.held = run.held and item.held
                run.slowed = run.slowed if item.held else 0.0
                run.moved.set()
            elif isinstance(item, Hold):
                run.held, run.slowed = not item.interval_s, item.interval_s
            elif not run.cancelled.is_set():
                run.cancel = item
                run.cancelled.set()
                run.moved.set()

    def flush(self, run: Run) -> None:
        while frames := run.outbox.take():
            segment = Segment(run.head.call, run.head.epoch, frames)
            if not self.lose(segment):
                self.send(segment)

    def send(self, item: Any) -> None:
        if not self.silent and not self.mute(item):
            self.bus.publish_now(subjects.frames(self.gateway, self.name), ToGateway((item,)))

    async def _beats(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for run in list(self.runs.values()):
                if run.outbox.done:
                    continue
                self.send(Beat(run.head.call, run.head.epoch, run.outbox.next_index))

    def report(self, *instances: InstanceStatus, boot: str = "b1", storage: Storage | None = None) -> None:
        """Publish a status."""
        self._sequence += 1
        status = NodeStatus(
            node=self.name,
            boot=boot,
            sequence=self._sequence,
            term=1,
            cpu=2,
            memory=1,
            free_cpu=2,
            free_memory=1,
            instances=instances,
            storage=storage,
        )
        self.bus.publish_now(subjects.status(self.name), status)


def starting(function: str, stage: Any, instance: str = "i1", version: int = 1) -> InstanceStatus:
    return InstanceStatus(
        instance=instance, function=function, version=version, state=InstanceState.STARTING, progress=stage
    )


class ScriptedController:
    """Writes routes and answers ``acquire`` (and whatever else is put into ``answers``)."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.acquires: list[Acquire] = []
        self.on_acquire: Callable[[Acquire], Awaitable[Acquired]] = self._never
        self.answers: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        self.store = await StateStore.open(self.bus, create=True, within_s=GIVE_UP_S)
        await self.store.elect("ctl")
        self._subscriptions.append(await self.bus.serve(subjects.ctl("acquire"), Acquire, self._acquire))

    async def serve(self, verb: str, request: type[Any], answer: Callable[[Any], Awaitable[Any]]) -> None:
        self._subscriptions.append(await self.bus.serve(subjects.ctl(verb), request, answer))

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()
        await self.store.close()

    async def _never(self, request: Acquire) -> Acquired:
        await asyncio.sleep(request.wait_s)
        return Acquired(pending="no node has room")

    async def _acquire(self, request: Acquire) -> Acquired:
        self.acquires.append(request)
        return await self.on_acquire(request)

    async def route(self, described: Manifest, *entries: RouteEntry, version: int = 1, active: bool = True) -> Route:
        route = Route(
            function=described.name,
            version=version,
            manifest=described,
            active=active,
            created=CREATED,
            entries=entries,
        )
        await self.store.put(subjects.route_key(described.name, version), route)
        return route

    async def unroute(self, function: str, version: int = 1) -> None:
        await self.store.delete(subjects.route_key(function, version))


@dataclass
class World:
    """A gateway on a real port with its peers."""

    nats: Nats
    gateway: Gateway
    node: ScriptedNode
    controller: ScriptedController
    url: str
    http: httpx.AsyncClient

    async def deploy(
        self, described: Manifest, *entries: RouteEntry, script: Script | None = None, **more: Any
    ) -> None:
        """A route, and the gateway knows it."""
        if script is not None:
            self.node.scripts[described.name] = script
        route = await self.controller.route(described, *entries, **more)
        await self.until_known(route)

    async def told(self, call: str = "") -> list[tuple[str, str | None, str]]:
        """The events of calls, or of that one: kind, instance, message."""
        text = (await self.http.get(f"{API}/events", params={"kind": "call", "call": call})).text
        found = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
        return [(each["kind"], each["instance"], each["message"]) for each in found]

    async def until_known(self, route: Route) -> None:
        def known() -> bool:
            version = self.gateway.table.get(route.function, route.version)
            return version is not None and version.route == route

        await until(known)


@asynccontextmanager
async def _serving(nats: Nats, settings: GatewaySettings) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient, str]]:
    """A gateway on a real port, a client of it, and its URL."""
    (listener,) = listen(settings)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    tasks = Tasks(f"http {settings.gateway}")
    try:
        # Nothing is encrypted here; to be ready for it takes 25 ms of a CPU. A call may be silent for longer than
        # httpx's own 5 s.
        client = httpx.AsyncClient(base_url=url, verify=False, timeout=GIVE_UP_S)
        async with running(await nats.bus(settings.gateway), settings) as gateway, client as http:
            server = make_server(gateway, settings)
            serving = tasks.start(server.serve([listener]), "serve")
            await until(lambda: server.started)
            try:
                yield gateway, http, url
            finally:
                await server.finish(serving, gateway.drain())
    finally:
        await tasks.close()
        listener.close()


@asynccontextmanager
async def world(nats: Nats, scripts: dict[str, Script] | None = None, **fields: Any) -> AsyncIterator[World]:
    """Everything started; all of it ended at the end. ``scripts``: what the node knows before there is a gateway."""
    settings = GatewaySettings.load(nats.env(GATEWAY), gateway=GATEWAY, port=0, **{"drain": 0.2, **fields})
    controller = ScriptedController(await nats.bus(CONTROLLER))
    node = ScriptedNode(await nats.bus(NODE))
    node.scripts |= scripts or {}
    await controller.start()
    await node.start()
    try:
        async with _serving(nats, settings) as (gateway, http, url):
            yield World(nats, gateway, node, controller, url, http)
    finally:
        await node.close()
        await controller.close()


@asynccontextmanager
async def second(nats: Nats, scripts: dict[str, Script] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Another gateway of the same cluster. ``scripts``: of the same node, for its calls."""
    settings = GatewaySettings.load(nats.env(GATEWAY_2), gateway=GATEWAY_2, port=0, drain=0.2)
    node = ScriptedNode(await nats.bus(NODE), gateway=GATEWAY_2)
    node.scripts |= scripts or {}
    await node.start()
    try:
        async with _serving(nats, settings) as (_, http, _):
            yield http
    finally:
        await node.close()
