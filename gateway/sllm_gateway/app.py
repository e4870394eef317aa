"""Puts the gateway together. Everything that runs is started and ended here."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import cast

from starlette.routing import BaseRoute, Route, Router

from sllm_gateway.asgi import Message, Receive, Scope, Send
from sllm_gateway.auth import Auth
from sllm_gateway.bodies import Bodies
from sllm_gateway.bundle_parts import BundleParts
from sllm_gateway.call import Call
from sllm_gateway.calls import Calls
from sllm_gateway.controller import Controller
from sllm_gateway.detached import Detached
from sllm_gateway.events import EventWriter
from sllm_gateway.front import Front
from sllm_gateway.headroom import Headroom
from sllm_gateway.hearsay import Hearsay
from sllm_gateway.journal import Journal
from sllm_gateway.keeping import Keeping
from sllm_gateway.leader import Leader
from sllm_gateway.ledger import Ledger
from sllm_gateway.lives import Lives
from sllm_gateway.lookup import Lookup
from sllm_gateway.metrics import Metrics
from sllm_gateway.news import News
from sllm_gateway.recent import Recent
from sllm_gateway.respond import Responder
from sllm_gateway.roll import Roll
from sllm_gateway.routes.api import Api
from sllm_gateway.routes.calling import Caller
from sllm_gateway.routes.calls import CallRoutes
from sllm_gateway.routes.deploy import Deploying
from sllm_gateway.routes.explain import Explaining
from sllm_gateway.routes.function import FunctionRoute
from sllm_gateway.routes.health import Live, MetricsRoute, Ready
from sllm_gateway.routes.logs import Logs
from sllm_gateway.routes.openai import ChatCompletions, Completions, Models
from sllm_gateway.routes.secrets import Secrets
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.starts import Starts
from sllm_gateway.stored import Stored
from sllm_gateway.succession import Succession
from sllm_gateway.table import RouteTable, Version
from sllm_gateway.taking_up import TakingUp
from sllm_runtime.platform import trace
from sllm_runtime.platform.announce import Announcer
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.platform.clock import since_boot
from sllm_runtime.platform.disk import shortage
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.presence import NOTHING, Presence
from sllm_runtime.platform.state import StateStore
from sllm_runtime.platform.watch import Watch
from sllm_runtime.protocol import records, subjects
from sllm_runtime.protocol.calls import CallOrder
from sllm_runtime.protocol.clipping import NAME_BYTES, clip
from sllm_runtime.protocol.errors import Cancelled, SllmError
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.lives import BEAT_S
from sllm_runtime.protocol.node import NodeStatus

log = logging.getLogger(__name__)


class Gateway:
    """One gateway. An ASGI application between ``start`` and ``stop``."""

    def __init__(
        self,
        bus: Bus,
        settings: GatewaySettings,
        *,
        clock: Callable[[], float] = time.monotonic,
        boot: Callable[[], float] = since_boot,
        wall: Callable[[], float] = time.time,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """``boot``: a clock that goes on while the machine sleeps, for what others do meanwhile: they take over the
        calls of a gateway that does not beat. What a call is allowed, by ``clock``, it is allowed awake."""
        self.settings = settings
        self._bus = bus
        self.metrics = Metrics(lambda function: function in self.table)
        self._starts = Starts()
        self._tasks = Tasks("gateway")
        self._announcer = Announcer(bus, "gateway", clock, wall)
        self._news = news = News(bus, clock, wall)
        self._leader = Leader(bus, clock)
        self._ledger = Ledger()
        self.calls = Calls(
            bus,
            self._leader,
            settings,
            self.metrics,
            clock,
            self._starts,
            self._ended,
            news.tell,
            self._ledger.placed,
        )
        self._recent = Recent(bus, settings.gateway, self.calls, clock)
        self.table = RouteTable(self._on_version)
        responder = Responder(self.calls, settings, clock)
        controller = Controller(self._leader, clock)
        self._lookup = Lookup(self.table, controller, clock)
        writer = EventWriter(
            self._tasks, headers_wait=settings.headers_wait, heartbeat=settings.heartbeat, slow=settings.slow_consumer
        )
        stored = Stored(bus, clock)
        lives, roll, journal = (
            Lives(bus, stored, settings.gateway, random, boot),
            Roll(settings.gateway),
            Journal(bus, stored, clock),
        )
        self._detached = Detached(
            self.calls, journal, self.table, self.metrics, lambda: lives.known, settings.resume_window, clock, wall
        )
        self._taking_up = TakingUp(self._detached, journal, self.table, lives, roll, given_up=self._given_up)
        self._parts = BundleParts(bus)
        hearsay = Hearsay(bus, settings.gateway, boot)
        self._succession = Succession(
            lives, roll, self._ledger, hearsay, journal, self._taking_up, self.calls.hand_on, boot
        )
        self._presence = Presence(bus, subjects.heard, NOTHING, self._succession.overdue, self._succession.left, clock)
        keeping = Keeping(
            bus,
            self._detached,
            journal,
            self.table,
            self._recent,
            writer,
            settings.max_output,
            clock,
            self.calls.collects,
        )

        def others() -> set[str]:
            return {life.gateway for life in roll.living(lives.me.life)}

        self._kept = CallRoutes(
            bus,
            journal,
            self._detached,
            keeping,
            self._recent,
            others,
            self._succession.coming,
            self.calls.cancel,
        )
        caller = Caller(
            self._lookup,
            self.calls,
            responder,
            settings,
            self.metrics,
            keeping,
            lives,
            self._ledger,
            clock,
            wall,
            random,
        )
        self.metrics.watch(
            self.calls.dispatcher.depths,
            lambda: len(self.calls),
            self.calls.drawn,
            lambda: 1 + len(others()),
            lambda: self._starts.nodes(clock()),
            lambda: self._leader.leads,
            lambda: not self.problem(),
        )
        self._headroom = Headroom(bus, settings, lambda: self._starts.storage(clock()), clock)
        self.metrics.read(self._headroom)
        self._statuses: Subscription | None = None
        self._watch: Watch | None = None
        self._drains = False
        auth, bodies = Auth(settings.token(), settings.token_file, settings.token), Bodies(settings.all_bodies())

        def front(routes: list[BaseRoute]) -> Front:
            return Front(Router(routes=routes, redirect_slashes=False), auth, self.metrics, bodies, random)

        api = self._api_routes(bus, controller, writer, journal, clock)
        self._front = front([*self._call_routes(caller, wall), *self._told_routes(), *api])
        self.telling = front(self._told_routes())
        """What of it is for probes and Prometheus, alone."""

    def _call_routes(self, caller: Caller, wall: Callable[[], float]) -> list[BaseRoute]:
        function, models = FunctionRoute(caller), Models(self.table, self._lookup)
        return [
            Route("/fn/{name}", function, methods=["POST"]),
            Route("/fn/{name}/{version}", function, methods=["POST"]),
            Route("/v1/completions", Completions(caller, wall), methods=["POST"]),
            Route("/v1/chat/completions", ChatCompletions(caller, wall), methods=["POST"]),
            Route("/v1/models", models, methods=["GET"]),
            Route("/v1/models/{model}", models, methods=["GET"]),
            *self._kept.routes(),
        ]

    def _told_routes(self) -> list[BaseRoute]:
        return [
            Route("/livez", Live(), methods=["GET"]),
            Route("/readyz", Ready(self.problem), methods=["GET"]),
            Route("/metrics", MetricsRoute(self.metrics, self._headroom), methods=["GET"]),
        ]

    def _api_routes(
        self, bus: Bus, controller: Controller, writer: EventWriter, journal: Journal, clock: Callable[[], float]
    ) -> list[BaseRoute]:
        settings = self.settings
        return [
            *Api(controller, self.table, settings, clock).routes(),
            *Deploying(bus, controller, writer, settings, self.table).routes(),
            *Logs(bus, controller, writer).routes(),
            *Explaining(bus, controller, self._recent, journal, self._succession.coming).routes(),
            *Secrets(controller, settings).routes(),
        ]

    def _ended(self, call: Call) -> None:
        """What broke is an event, and logged also where there were too many of these. What a caller did wrong, and what
        there is no room for, is counted: there may be a thousand of it a second, and it would push out the other events
        of this gateway."""
        self._ledger.end(call.id)
        self._recent.ended(call)
        error = call.error
        if isinstance(error, Cancelled):
            self._news.tell(Kind.CALL_CANCELLED, call, error.message)
        if error is None or error.status < 500 or self.calls.left(call):
            return
        with trace.within(call.order.traceparent):
            self._failed(error, call.version.function, call.version.number, call.id)

    def _given_up(self, order: CallOrder, error: SllmError) -> None:
        """As ``_ended``, of a kept call whose gateway is no more, and which nobody goes on with."""
        self.metrics.given_up(order.function, error)
        if isinstance(error, Cancelled):
            self._announcer.tell(
                Kind.CALL_CANCELLED,
                error.message,
                function=order.function,
                version=order.version,
                call=order.call,
            )
        elif error.status >= 500:
            with trace.within(order.traceparent):
                self._failed(error, order.function, order.version, order.call)

    def _failed(self, error: SllmError, function: str, version: int, call: str) -> None:
        log.warning("%s: %s: %s", Kind.CALL_FAILED, error.code, error.message, extra={"call": call})
        fields = {"code": clip(error.code, NAME_BYTES)}
        self._announcer.tell(Kind.CALL_FAILED, error.message, fields, function=function, version=version, call=call)

    def _on_version(self, version: Version) -> None:
        self.calls.on_version(version)

    async def __call__(self, scope: Scope, receive: Receive, send: Callable[[Message], Awaitable[None]]) -> None:
        await self._front(scope, receive, cast(Send, send))  # what a server gives is a coroutine function

    def problem(self) -> str:
        """Why this gateway is not ready; empty if it is. On a full disk ready functions are called all the same."""
        if self._drains:
            return f"it stops: {len(self.calls)} call(s) have not ended"
        if not self._bus.connected:
            return "NATS is not connected"
        if self._watch is None or not self._watch.synced.is_set():
            return "the route table is not complete"
        return shortage(self.settings.nats_store)

    async def start(self) -> None:
        """Subscribe, learn the routes. Raises ``Unavailable``."""
        store = await StateStore.open(self._bus, create=False)
        await self._leader.start()
        await self.calls.start()
        self._statuses = await self._bus.subscribe(subjects.STATUS_ALL, NodeStatus, self.calls.on_status)
        self._watch = await store.watch(subjects.ROUTE_KEYS, records.Route, self.table.apply)
        await self._kept.start()
        await self._parts.start()
        await self._recent.start()
        await self._succession.start()
        self._presence.start()
        self._taking_up.start()
        self._announcer.tell(Kind.GATEWAY_READY)

    async def drain(self) -> None:
        """No new call; running ones may end within ``drain`` seconds. Then another gateway, or the next life of this
        one, goes on with those that can. Their callers are sent there once this life is over: before, they would be
        told that there is no such call, as of any gateway that still beats."""
        self._drains = True
        self._announcer.tell(Kind.GATEWAY_STOPPING, f"{len(self.calls)} call(s) have {self.settings.drain:g} s to end")
        await self.calls.drain(self.settings.drain)
        streams = self._ledger.hand_on()
        self.calls.stop(streams)
        await self._detached.finish(BEAT_S)
        await self._presence.close()
        await self._taking_up.close()  # what it would take up now nobody would look for
        await self._succession.close()
        self.calls.hand_on(streams, "this one stops")

    async def stop(self) -> None:
        """End everything, or as much of it as has begun. Repeatable."""
        if self._watch is not None:
            await self._watch.close()
        if self._statuses is not None:
            await self._statuses.unsubscribe()
            self._statuses = None
        await self._parts.close()
        await self._kept.close()
        await self._recent.close()
        await self._presence.close()
        await self._taking_up.close()
        await self._detached.close()
        await self.calls.close()
        await self._succession.close()
        await self._lookup.close()
        await self._leader.close()
        await self._tasks.close()


@asynccontextmanager
async def running(bus: Bus, settings: GatewaySettings) -> AsyncIterator[Gateway]:
    """A started gateway on ``bus``, stopped at the end."""
    gateway = Gateway(bus, settings)
    try:
        await gateway.start()
        yield gateway
    finally:
        await gateway.stop()
