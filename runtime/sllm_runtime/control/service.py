"""The controller's verbs: ``ctl.VERBS`` on the bus, each answered from the view or by the part that does the work."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Final, TypeVar

import msgspec

from sllm_runtime.control import draining, explain, listing, migration, registry, routes, secret_users, warmup
from sllm_runtime.control.deletion import Deletions
from sllm_runtime.control.deploy import Deployments
from sllm_runtime.control.lease import Leadership
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.models import Models
from sllm_runtime.control.pulling import Pulls
from sllm_runtime.control.reports import suspect
from sllm_runtime.control.spreading import Spreading
from sllm_runtime.control.vault import Vault
from sllm_runtime.control.view import Key, View
from sllm_runtime.platform import trace
from sllm_runtime.platform.bus import Bus, Subscription
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import SecretNotFound, Unavailable
from sllm_runtime.protocol.limits import CONTROLLER_WAIT_S, LONG_POLL_S, RPC_TIMEOUT_S
from sllm_runtime.protocol.node import Ok
from sllm_runtime.protocol.records import VersionRecord

T = TypeVar("T")

CONCURRENCY: Final = 16384
"""Requests of one verb at once: nearly all are long polls, one for each gateway and waiting version."""
MAX_WAIT_S: Final = 2 * LONG_POLL_S
Handler = Callable[[Any], Awaitable[msgspec.Struct]]


def waited(wait_s: float) -> float:
    """The asker's patience, within what a lost reply may cost."""
    return min(max(wait_s, 0.0), MAX_WAIT_S)


class _Overtaken(Exception):
    """What was decided for one version is another one's by now."""


class Service:
    """Answers the gateways. ``open`` once; ``close`` ends every request that is being answered."""

    def __init__(
        self,
        loop: Loop,
        leadership: Leadership,
        bus: Bus,
        models: Models,
        pulls: Pulls,
        spreading: Spreading,
        deployments: Deployments,
        deletions: Deletions,
        vault: Vault,
    ) -> None:
        self._loop, self._leadership, self._bus = loop, leadership, bus
        self._spreading, self._vault = spreading, vault
        self._models, self._pulls, self._deployments, self._deletions = models, pulls, deployments, deletions
        self._polls: dict[tuple[Key, str], object] = {}
        self._subscriptions: list[Subscription] = []

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """One for each of ``ctl.VERBS``."""
        return {
            "acquire": self.acquire,
            "locate": self.locate,
            "deploy": self._deployments.deploy,
            "withdraw": self._deployments.withdraw,
            "functions": self.functions,
            "function": self.function,
            "rollback": self.rollback,
            "delete": self._deletions.delete,
            "register": self.register,
            "pull": self.pull,
            "placement": self.placement,
            "models": self.models,
            "model": self.model,
            "nodes": self.nodes,
            "cordon": self.cordon,
            "forget": self.forget,
            "migrate": self.migrate,
            "warmup": self.warmup,
            "explain": self.explain,
            "secrets": self.secrets,
            "put_secret": self.put_secret,
            "delete_secret": self.delete_secret,
            "ping": self.ping,
        }

    async def open(self) -> None:
        """Serve. Raises ``Unavailable``."""
        for verb, handler in self.handlers.items():
            request = ctl.VERBS[verb][0]
            # No queue group: a leader that was stopped would be given its share of the questions.
            sure = self._sure(handler, ctl.TELLING.get(verb, CONTROLLER_WAIT_S))
            self._subscriptions.append(
                await self._bus.serve(subjects.ctl(verb), request, sure, concurrency=CONCURRENCY)
            )

    def _sure(self, handler: Handler, within_s: float) -> Handler:
        """``handler``, heard only of a controller that leads: before it begins, and before it answers. One that lacks
        the proof for ``within_s`` says so. Where another one leads by then it may be the first to answer, with no more
        than that: the asker asks again, and the other one goes on with what it was asked."""

        async def handle(request: Any) -> msgspec.Struct:
            await self._leadership.assured(within_s)
            answer = await handler(request)
            await self._leadership.assured(within_s)
            return answer

        return handle

    async def close(self) -> None:
        for subscription in self._subscriptions:
            await subscription.unsubscribe()

    # --- calls --------------------------------------------------------------------------------------
    async def acquire(self, request: ctl.Acquire) -> ctl.Acquired:
        """Long poll for an instance this gateway does not have yet. Joined: demand is counted, starts are planned. One
        that another poll of the same gateway has taken over from counts no more, and is answered."""
        key = (request.function, request.version)
        if request.gone:
            self._loop.change(lambda view: suspect(view, request.gone))
        at_once = routes.answer(self._loop.view, request, time.monotonic())
        if at_once is not None:
            return at_once
        mine, traced = object(), trace.current()

        def answer(view: View) -> ctl.Acquired | None:
            found = routes.answer(view, request, time.monotonic())
            over = self._polls.get((key, request.gateway)) is not mine
            return routes.so_far(view, request) if found is None and over else found

        self._polls[key, request.gateway] = mine
        if traced:
            self._loop.traces[key] = traced
        self._loop.change(lambda view: view.put_waiting(key, request.gateway, request.waiting, request.call))
        self._loop.look_again(request.function)
        try:
            found = await self._loop.until(request.function, answer, waited(request.wait_s))
        finally:
            if self._loop.traces.get(key) is traced:
                del self._loop.traces[key]
            # A later poll of the same gateway has taken over its count.
            if self._polls.get((key, request.gateway)) is mine:
                del self._polls[key, request.gateway]
                self._loop.change(lambda view: view.put_waiting(key, request.gateway, 0))
        return found or routes.so_far(self._loop.view, request)

    async def locate(self, request: ctl.Locate) -> ctl.Located:
        return ctl.Located(version=routes.locate(self._loop.view, request.function, request.version))

    # --- functions ----------------------------------------------------------------------------------
    async def functions(self, request: ctl.Listing) -> ctl.FunctionList:
        return listing.functions(self._loop.view, request.after)

    async def function(self, request: ctl.FunctionRef) -> ctl.FunctionInfo:
        return listing.function(self._loop.view, request.function, request.after)

    async def rollback(self, request: ctl.Rollback) -> ctl.FunctionInfo:
        """The route is back when this answers; instances of the version that lost it end by their keep-alive."""
        function, version, by = request.function, request.version, request.request

        def to(view: View) -> tuple[View, VersionRecord]:
            after = registry.rollback(view, function, version, by)
            return after, after.versions[function, after.functions[function].active or 0]

        def step(view: View) -> View:
            after, again = to(view)
            if again.version != meant.version:
                raise _Overtaken
            return after

        while True:
            _, meant = to(self._loop.view)
            with contextlib.suppress(_Overtaken):  # by another one's: it goes elsewhere, with other secrets
                async with self._deployments.holding(meant.manifest.secrets):
                    with contextlib.suppress(Unavailable):  # nobody can tell: what runs of it goes on
                        await self._deployments.look(meant.manifest.secrets)
                    view = await self._loop.commit(step)
                return listing.function(view, function)

    # --- models and nodes ---------------------------------------------------------------------------
    async def register(self, request: ctl.RegisterModel) -> ctl.Registered:
        return await self._models.register(request.uri, waited(request.wait_s))

    async def pull(self, request: ctl.Pull) -> ctl.Pulled:
        return await self._pulls.pull(request.digest, request.nodes, waited(request.wait_s))

    async def placement(self, request: ctl.Placement) -> ctl.Placements:
        return await (self._spreading.redo() if request.redo else self._spreading.shown())

    async def models(self, request: ctl.Listing) -> ctl.ModelList:
        return listing.models(self._loop.view, request.after)

    async def model(self, request: ctl.ModelRef) -> ctl.ModelInfo:
        if request.verb == "validate":
            return await self._models.validate(request.digest)
        if request.verb == "delete":
            return await self._models.delete(request.digest, again=request.again)
        return registry.model_info(self._loop.view, registry.model_of(self._loop.view, request.digest))

    async def nodes(self, request: ctl.Listing) -> ctl.NodeList:
        return listing.nodes(self._loop.view, request.after, time.monotonic())

    async def cordon(self, request: ctl.Cordon) -> ctl.NodeInfo:
        """Decided and stored; what leaves then takes its time."""
        name, cordoned, drain = request.node, request.cordoned, request.drain
        view = await self._loop.commit(lambda view: draining.cordon(view, name, cordoned=cordoned, drain=drain))
        return registry.node_info(view, name, time.monotonic())

    async def forget(self, request: ctl.Forget) -> Ok:
        name = request.node
        if not (request.again and name not in self._loop.view.nodes):
            await self._loop.commit(lambda view: draining.forget(view, name, time.monotonic()))
        return Ok(note="forgotten")

    async def migrate(self, request: ctl.Migrate) -> ctl.Migrated:
        """Long poll until it is over."""
        name = request.instance
        view = self._loop.change(lambda view: migration.ask(view, name, request.to, time.monotonic()))
        instance = view.instances.get(name)
        if instance is None:
            return migration.so_far(view, name)
        found = await self._loop.until(
            instance.key[0], lambda view: migration.outcome(view, name), waited(request.wait_s)
        )
        return found or migration.so_far(self._loop.view, name)

    async def explain(self, request: ctl.Explain) -> ctl.Explained:
        """What would be decided now; of an ``instance`` whose start is remembered, what was decided then."""
        past = self._loop.history.of(request.instance) if request.instance else None
        if past is not None:
            came = self._loop.history.outcomes(past.instance.key, request.instance)
            return explain.started(past, self._loop.policy, came)
        key = (request.function, routes.locate(self._loop.view, request.function, request.version))
        came = self._loop.history.outcomes(key)
        return explain.explained(self._loop.view, key, self._loop.policy, time.monotonic(), came)

    async def warmup(self, request: ctl.Warmup) -> ctl.Warmed:
        """Long poll until so many are ready."""
        wait_s = waited(request.wait_s)
        key = (request.function, routes.locate(self._loop.view, request.function, request.version))
        until = time.monotonic() + wait_s + warmup.GRACE_S
        self._loop.change(lambda view: warmup.asked(view, key, request.instances, until))
        found = await self._loop.until(
            request.function, lambda view: warmup.answer(view, key, request.instances, time.monotonic()), wait_s
        )
        if found is not None:
            self._loop.change(lambda view: warmup.granted(view, key, request.instances))
        return found or warmup.so_far(self._loop.view, key, request.instances)

    # --- secrets ------------------------------------------------------------------------------------
    async def secrets(self, request: ctl.Listing) -> ctl.SecretList:
        return listing.secrets(self._loop.view, await self._in_time(self._vault.names()), request.after)

    async def put_secret(self, request: ctl.PutSecret) -> ctl.SecretInfo:
        """Instances that start from now on get it; those that run keep what they have."""
        stored = await self._in_time(self._vault.put(request.name, request.value))
        return msgspec.structs.replace(stored, functions=secret_users.of(self._loop.view, request.name))

    async def delete_secret(self, request: ctl.SecretRef) -> Ok:
        return await self._in_time(self._deleted(request))

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """What ``work`` gives, which goes on where the vault does not answer. Raises ``Unavailable`` then."""
        doing = asyncio.ensure_future(work)
        doing.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may wait any more
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                return await asyncio.shield(doing)
        except TimeoutError as error:
            text = f"the platform's secrets do not answer within {RPC_TIMEOUT_S:g} s: it may be done yet; ask again"
            raise Unavailable(text) from error

    async def _deleted(self, request: ctl.SecretRef) -> Ok:
        async with self._deployments.holding((request.name,)):
            secret_users.unneeded(self._loop.view, request.name)
            try:
                await self._vault.remove(request.name)
            except SecretNotFound:
                if not request.again:
                    raise
        return Ok(note="deleted")

    async def ping(self, _: ctl.Nothing) -> Ok:
        return Ok(note="leading")
