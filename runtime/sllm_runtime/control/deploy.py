"""Deployments: a version takes the route once one instance of it has started; a failure leaves nothing half done."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Final

import msgspec

from sllm_runtime.control import instances, registry, routes
from sllm_runtime.control.autoscale import floor
from sllm_runtime.control.changes import NODES
from sllm_runtime.control.deployment import CALLED_BACK, Deployment, Needed, needed_of, unless
from sllm_runtime.control.fits import check_python, need_of, unheeded, unsupported
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.loop import STORE_S, Loop
from sllm_runtime.control.minimums import crowded
from sllm_runtime.control.models import DIGEST, NODES_WAIT_S, Models, Preparation, nodes_known
from sllm_runtime.control.placement import unsatisfiable
from sllm_runtime.control.plan import TAKE_S
from sllm_runtime.control.providing.awaiting import longest_s
from sllm_runtime.control.vault import Vault
from sllm_runtime.control.view import Key, View
from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Deploy, Deployed, Withdraw, Withdrawn
from sllm_runtime.protocol.errors import (
    Cancelled,
    Conflict,
    InternalError,
    InvalidBundle,
    InvalidManifest,
    NoCapacity,
    SllmError,
    Unavailable,
    Unsatisfiable,
)
from sllm_runtime.protocol.limits import KIB, LONG_POLL_S, RPC_TIMEOUT_S
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import CAPACITY, Progress
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.records import ModelRecord, VersionRecord

log = logging.getLogger(__name__)

MAX_MANIFEST: Final = 256 * KIB
WITHDRAW_S: Final = 1.0
"""Somebody waits at a terminal for what became of their Ctrl-C."""
KEEP_S: Final = 120.0
"""How long the outcome of a deployment is kept for an asker whose reply was lost."""
MOST_WITHDRAWN: Final = 1000
"""Requests called back before they came that are known at once: of more, the oldest are forgotten."""
CAPACITY_LOOK_S: Final = 0.5
CRASHES: Final = 3
"""Nodes that may die under a trial before the deployment gives up."""


class Deployments:
    """Runs deployments, one at a time for each function. ``close`` breaks them off; a new controller forgets them."""

    def __init__(self, loop: Loop, ledger: Ledger, models: Models, bus: Bus, vault: Vault) -> None:
        self._loop, self._ledger, self._models, self._bus, self._vault = loop, ledger, models, bus, vault
        self._known: dict[str, Deployment] = {}
        self._withdrawn: dict[str, float] = {}
        """Requests called back before they came, with the time; forgotten after KEEP_S."""
        self._secrets = asyncio.Lock()
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: Counter[str] = Counter()
        self._tasks = Tasks("deployments")

    async def close(self) -> None:
        await self._tasks.close()

    @contextlib.asynccontextmanager
    async def holding(self, secrets: Iterable[str]) -> AsyncIterator[None]:
        """While one of ``secrets`` goes, and from when those of a version are looked for until it is known to need
        them: one after the other, and who has none waits for nobody. Raises ``Unavailable``."""
        if not tuple(secrets):
            yield
            return
        try:
            async with asyncio.timeout(STORE_S):
                await self._secrets.acquire()
        except TimeoutError as error:
            raise Unavailable("secrets cannot be looked for now: others that need them wait; try again") from error
        try:
            yield
        finally:
            self._secrets.release()

    async def look(self, secrets: Iterable[str]) -> None:
        """Whether those are there. Raises ``SecretNotFound``; ``Unavailable``, also where nobody can tell in time."""
        try:
            async with asyncio.timeout(RPC_TIMEOUT_S):
                await self._vault.read(secrets)
        except TimeoutError as error:
            raise Unavailable(f"secrets cannot be read: no answer within {RPC_TIMEOUT_S:g} s; try again") from error

    async def deploy(self, request: Deploy) -> Deployed:
        """Long poll. Raises what ended the deployment."""
        deployment = self._join(request)
        try:
            async with asyncio.timeout(min(max(request.wait_s, 0.0), 2 * LONG_POLL_S)):
                await deployment.done.wait()
        except TimeoutError:
            return Deployed(progress=deployment.tell())
        deployed = deployment.result()
        return msgspec.structs.replace(deployed, notes=(*unheeded(request.manifest), *self._crowded(deployed.version)))

    def _crowded(self, version: VersionRecord | None) -> tuple[str, ...]:
        found = crowded(self._loop.view, (version.function, version.version)) if version is not None else ""
        return (found,) if found else ()

    async def withdraw(self, request: Withdraw) -> Withdrawn:
        """Call a deployment back. Answered when nothing of it is left, or its version has got the route first. Raises
        ``Unavailable`` while that is being stored."""
        # Perhaps from a controller before: this one may have begun it anew, or never have heard of it.
        routed = registry.routed_by(self._loop.view, request.request)
        if routed is not None:
            return Withdrawn(version=routed)
        now = time.monotonic()
        self._forget(now)
        deployment = self._known.get(request.request)
        if deployment is None:  # not here yet; or of a controller that is gone, and with it what it was doing
            self._withdrawn.pop(request.request, None)
            self._withdrawn[request.request] = now
            if len(self._withdrawn) > MOST_WITHDRAWN:
                del self._withdrawn[next(iter(self._withdrawn))]
            return Withdrawn()
        deployment.withdrawn.set()
        with contextlib.suppress(TimeoutError):  # behind another deployment: it will find itself called back
            async with asyncio.timeout(WITHDRAW_S):
                await deployment.done.wait()
        routed = registry.routed_by(self._loop.view, request.request)
        if routed is None and deployment.active is not None:
            text = "whether it gets the route is not known yet: that is being stored"
            raise Unavailable(f"{text}; see `sllm fn describe {deployment.request.manifest.name}`")
        return Withdrawn(version=routed)

    def _forget(self, now: float) -> None:
        for name, old in tuple(self._known.items()):
            if old.done.is_set() and now - old.ended > KEEP_S:
                del self._known[name]
        self._withdrawn = {name: at for name, at in self._withdrawn.items() if now - at <= KEEP_S}

    def _join(self, request: Deploy) -> Deployment:
        self._forget(time.monotonic())
        if request.request in self._withdrawn:
            raise Cancelled(CALLED_BACK)
        deployment = self._known.get(request.request)
        if deployment is None:
            deployment = self._known[request.request] = Deployment(request)
            deployment.task = self._tasks.start(self._run(deployment), f"deploy {request.manifest.name}")
        elif (deployment.request.bundle, deployment.request.manifest) != (request.bundle, request.manifest):
            raise Conflict(f"deployment {request.request} has another content; use a new request id")
        return deployment

    async def _run(self, deployment: Deployment) -> None:
        name = deployment.request.manifest.name
        lock = self._locks.setdefault(name, asyncio.Lock())
        self._users[name] += 1
        deployment.tell = lambda: Progress(stage="queue", message=f"another deployment of {name} is running")
        try:
            async with lock:
                deployment.outcome = await self._deploy(deployment)
        except SllmError as error:
            deployment.error = error.body()
            log.info("deployment failed: %s", error.message, extra={"function": name})
        except Exception as error:
            deployment.error = InternalError(f"deployment of {name}: {type(error).__name__}: {error}").body()
            raise
        finally:
            deployment.ended = time.monotonic()
            deployment.done.set()
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._locks[name]

    # --- one deployment -----------------------------------------------------------------------------
    async def _deploy(self, deployment: Deployment) -> Deployed:
        request = deployment.request
        deployment.tell = lambda: Progress(stage="check")
        routed = registry.routed_by(self._loop.view, request.request)
        if routed is not None:  # asked again; it may be another one's turn by now
            return Deployed(version=self._loop.view.versions[request.manifest.name, routed])
        try:
            needed = await unless(deployment.withdrawn, self._prepare(deployment))
        except SllmError:
            await self._clean(request.bundle)
            raise
        adapters = {name: adapter.digest for name, adapter in needed.adapters.items()}
        digest = registry.content(
            request.manifest, request.bundle, needed.model.digest if needed.model else None, adapters
        )
        known = registry.same(self._loop.view, request.manifest.name, digest)
        if known is not None:
            return await self._again(deployment, known)
        version = self._version(request, needed, digest)
        key = (version.function, version.version)
        try:
            async with self.holding(request.manifest.secrets):  # its model may have been made ready for long
                await self.look(request.manifest.secrets)
                await self._loop.commit(
                    lambda view: registry.create(view, version, needed.model, needed.adapters.values())
                )
            await unless(deployment.withdrawn, self._trial(deployment, key, request.manifest))
            before = self._loop.view.versions_of(key[0])
            await self._activate(deployment, key)
        except SllmError as error:
            body = error.body()
            undo = registry.withdraw if deployment.withdrawn.is_set() else registry.discard
            self._loop.change(lambda view: registry.failed(view, key, body))  # told, also where it is not kept
            self._loop.change(lambda view: undo(view, key, body))
            await self._undone(request.bundle)
            raise
        kept = {record.version for record in self._loop.view.versions_of(key[0])}
        for bundle in {record.bundle for record in before if record.version not in kept}:
            await self._clean(bundle)
        return Deployed(version=self._loop.view.versions.get(key, version))

    async def _prepare(self, deployment: Deployment) -> Needed:
        """Everything before the version is made: its model and its adapters, if it has any."""
        await self._check(deployment.request)
        manifest = deployment.request.manifest
        places = {"": manifest.model, **manifest.adapters} if manifest.model is not None else {}
        coming = {name: self._begin(place, manifest) for name, place in places.items() if place is not None}
        found = {name: await self._model(deployment, model) for name, model in coming.items()}
        return needed_of(found)

    async def _activate(self, deployment: Deployment, key: Key) -> None:
        """Give it the route. From here on it is not called back any more. Raises ``Unavailable``: it has not got it;
        ``Cancelled`` where it was called back before."""
        if deployment.withdrawn.is_set():  # while its secrets were looked for: who did so was told that nothing is left
            raise Cancelled(CALLED_BACK)
        deployment.active = key[1]
        by = deployment.request.request

        def step(view: View) -> View:
            registry.present(view, key[0])  # somebody may have had it deleted meanwhile
            return registry.prune(registry.activate(view, key, by), key[0])

        try:
            await self._loop.commit(step)
        except BaseException:
            deployment.active = None
            raise

    async def _undone(self, bundle: str) -> None:
        """Remove the bundle of what was undone, once no record in the store names it."""
        try:
            await self._ledger.settled(STORE_S)
        except Unavailable as error:
            log.warning("bundle %s is left for the sweep: %s", bundle, error.message)
            return
        await self._clean(bundle)

    async def _again(self, deployment: Deployment, known: VersionRecord) -> Deployed:
        """The content is there already: it gets the route, and a new chance if it was in a back-off. It takes it from
        another version as a new one does, once an instance of it is ready; one that cannot start leaves it there."""
        key = (known.function, known.version)
        registry.present(self._loop.view, key[0])
        try:
            if not self._loop.view.active(key):
                self._loop.change(lambda view: view.put_failure(key, None).put_trial(key, True))
                await unless(deployment.withdrawn, self._trial(deployment, key, known.manifest))
            async with self.holding(known.manifest.secrets):
                await self.look(known.manifest.secrets)
                await self._activate(deployment, key)
        except SllmError:  # not as this controller closes: the next one is asked for the same again
            self._loop.change(lambda view: _untried(view, key))
            raise
        return Deployed(version=self._loop.view.versions.get(key, known), unchanged=True)

    def _version(self, request: Deploy, needed: Needed, digest: str) -> VersionRecord:
        function = self._loop.view.functions.get(request.manifest.name)
        return VersionRecord(
            function=request.manifest.name,
            version=function.last_version + 1 if function else 1,
            manifest=request.manifest,
            bundle=request.bundle,
            bundle_bytes=request.bundle_bytes,
            content=digest,
            model=needed.model.digest if needed.model else None,
            adapters={name: adapter.digest for name, adapter in needed.adapters.items()},
            created=time.time(),
            request=request.request,
        )

    async def _check(self, request: Deploy) -> None:
        """Raises what makes this deployment impossible, before anything is registered."""
        manifest = request.manifest
        if manifest.name in self._loop.view.functions:
            registry.present(self._loop.view, manifest.name)
        size = registry.manifest_bytes(manifest)
        if size > MAX_MANIFEST:
            text = f"the manifest has {show_bytes(size)}, {show_bytes(MAX_MANIFEST)} fit: shorten type hints or env"
            raise InvalidManifest(text, field="handler.input_schema")
        found = await self._loop.until(NODES, lambda view: nodes_known(view, time.monotonic()), NODES_WAIT_S)
        if found is None:
            raise NoCapacity("no node has reported; start one, and see `sllm node list`", stage="check")
        check_python(self._loop.view, manifest)
        never = unsupported(manifest) or unsatisfiable(need_of(manifest), self._loop.view)
        if never:
            raise Unsatisfiable(f"function {manifest.name!r}: {never}", stage="check")
        await self._ledger.require_room()
        await self.look(manifest.secrets)
        stored = await bundles.size(self._bus, request.bundle)
        if stored is None:
            raise InvalidBundle(f"bundle {request.bundle[:19]} is not stored; upload it, then deploy", field="bundle")
        if stored != request.bundle_bytes:
            text = f"bundle {request.bundle[:19]} has {stored} bytes, the deployment says {request.bundle_bytes}"
            raise InvalidBundle(text, field="bundle_bytes")

    def _begin(self, place: str, manifest: Manifest) -> ModelRecord | Preparation:
        """A model that is registered, or one that is being made ready from here on."""
        if place.startswith(DIGEST):
            return registry.model_of(self._loop.view, place)
        return self._models.join(place, manifest)

    async def _model(self, deployment: Deployment, model: ModelRecord | Preparation) -> ModelRecord:
        if isinstance(model, ModelRecord):
            return model
        deployment.tell = lambda: model.progress
        await model.done.wait()
        return model.result()

    async def _trial(self, deployment: Deployment, key: Key, manifest: Manifest) -> None:
        """Wait until an instance is ready. The node bounds its start; here waiting for capacity is bounded, and for one
        that a node has begun: where its secrets are not had it is given up and placed anew, on node after node."""
        deployment.tell = lambda: trial_progress(self._loop.view, key)
        capacity = time.monotonic()
        while await self._loop.until(key[0], lambda view: verdict(view, key), CAPACITY_LOOK_S) is None:
            view, now = self._loop.view, time.monotonic()
            there = [instance for instance in view.of(key) if instance.live]
            most = max(manifest.queue_timeout, longest_s(view, key)) + (TAKE_S if there else 0.0)
            if any(instance.acked or instance.seen is not None for instance in there):
                capacity = now
            elif now - capacity >= most:
                refused = (said.reason for (which, _), said in view.refused.items() if which == key)
                why = view.why(key, next(refused, "no capacity"))
                text = f"no instance of {key[0]!r} could be placed within {manifest.queue_timeout:g} s: {why}"
                raise NoCapacity(text, stage="placement")

    def needs(self, bundle: str, *, but: asyncio.Task[None] | None = None) -> bool:
        """Whether a deployment that goes on, other than that of task ``but``, is of this bundle."""
        users = (d for d in self._known.values() if d.request.bundle == bundle and (but is None or d.task is not but))
        return any(not user.done.is_set() for user in users)

    async def _clean(self, bundle: str) -> None:
        """Remove the bundle if no version, and no other deployment, needs it."""
        own = asyncio.current_task()
        await remove_bundles(self._loop, self._bus, [bundle], lambda digest: self.needs(digest, but=own))


async def remove_bundles(loop: Loop, bus: Bus, digests: Iterable[str], needed: Callable[[str], bool]) -> None:
    """Delete those that no version and no deployment (``needed``) needs when their turn has come: a deployment may have
    begun meanwhile, also while one is looked for. Nothing fences bundles: only while it is sure that it leads, since
    another leader's versions may need what this one's view does not. One that stays is logged: it costs room only,
    until the next sweep."""

    def may(digest: str) -> bool:
        if needed(digest) or not registry.unreachable(loop.view, [digest]):
            return False
        if not loop.may_act:
            log.warning("bundle %s is left for the sweep: it is not sure that this controller leads", digest)
        return loop.may_act

    for digest in digests:
        if not may(digest):
            continue
        try:
            await bundles.delete(bus, digest, functools.partial(may, digest))
        except SllmError as error:
            log.warning("bundle %s was not removed: %s", digest, error.message)


def verdict(view: View, key: Key) -> bool | None:
    """True when an instance of the trial is ready, or a rollback has given it the route meanwhile. Raises what its
    start failed with."""
    version = view.versions.get(key)
    function = view.functions.get(key[0])
    if version is None or function is None or function.deleting:
        raise Conflict(f"function {key[0]!r} was deleted while it was deployed")
    if view.active(key) or any(instance.ready for instance in view.of(key)):
        return True
    failure = view.failures.get(key)
    if failure is not None and (failure.blocking or failure.attempts >= CRASHES):
        raise failure.error.to_error()
    return None


def _untried(view: View, key: Key) -> View:
    """It is on trial no longer; what starts for that alone has nobody who waits for it."""
    view = view.put_trial(key, False)
    version = view.versions.get(key)
    if version is None or view.active(key) or view.demand(key) or floor(view, key, version.manifest):
        return view
    for instance in tuple(view.of(key)):
        if instance.live and not instance.ready:
            view = instances.stop(view, instance, "its deployment has ended", 0.0)
    return view


def trial_progress(view: View, key: Key) -> Progress:
    """How far the first instance is, or why it waits."""
    return routes.progress(view, key) or Progress(stage=CAPACITY, message=view.why(key))
