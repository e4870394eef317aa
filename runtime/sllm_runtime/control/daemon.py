"""One controller from election to end. ``python -m sllm_runtime.control`` runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from sllm_runtime.control import migration, restore
from sllm_runtime.control.deletion import Deletions
from sllm_runtime.control.deploy import Deployments
from sllm_runtime.control.lease import Leadership
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.models import Models
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.placement import Policy
from sllm_runtime.control.providing.settings import ProviderSettings
from sllm_runtime.control.providing.supplying import check, supplied
from sllm_runtime.control.pulling import Pulls
from sllm_runtime.control.remembering import Remembering
from sllm_runtime.control.scheduling.moving import SETTLED_S
from sllm_runtime.control.scheduling.policies import DEFAULT, POLICIES, Preemption, StartupTime
from sllm_runtime.control.sealed_vault import Keyring, SealedVault
from sllm_runtime.control.service import Service
from sllm_runtime.control.spreading import Spreading
from sllm_runtime.control.standby import stand_by
from sllm_runtime.control.sweeping import Sweeps
from sllm_runtime.control.vault import DirectoryVault, Vault
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.disk import shortage
from sllm_runtime.platform.owned import end
from sllm_runtime.platform.presence import NOTHING, Presence
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.subjects import STATUS_ALL, TOKEN, node_command

log = logging.getLogger(__name__)

SECRETS: Final = "secrets"


class ControllerSettings(ProviderSettings):
    """``SLLM_CONTROLLER``: its identity where no identity file says it. ``SLLM_POLICY``: how nodes are chosen, one of
    ``scheduling.policies.POLICIES``."""

    controller: str = Field(default="controller", pattern=TOKEN)
    secrets: Path | None = None
    """Directory of the platform's secrets; default: in ``home``. All its controllers need the same, or one key."""
    secrets_key: Path | None = None
    """File with the key of secrets, the same for all controllers: then they are sealed records of the state."""
    policy: Literal["random", "availability", "locality", "preemption", "startup-time"] = DEFAULT

    settled: float = Field(default=SETTLED_S, ge=0)
    """Seconds for which no start has the calls of an instance moved after they were (of these at most as many as moves
    are remembered), or one stopped that became ready."""

    def chosen_policy(self) -> Policy:
        """The policy of that name."""
        kind = POLICIES[self.policy]
        if issubclass(kind, StartupTime | Preemption):
            if self.settled > migration.KEEP_S:
                text = "SLLM_SETTLED=%g: what was moved may be moved again after %g s, no longer is it remembered"
                log.warning(text, self.settled, migration.KEEP_S)
            return kind(settled_s=self.settled)
        return kind()

    def vault(self, store: StateStore) -> Vault:
        """What keeps the platform's secrets. Raises ``InvalidRequest`` for a key that is none."""
        if self.secrets_key is not None:
            return SealedVault(store, Keyring.read(self.secrets_key))
        return DirectoryVault(self.secrets or self.home / SECRETS)

    @property
    def name(self) -> str:
        """Who it is on the bus."""
        who = self.identity()
        return who.identity if who is not None else self.controller


@dataclass(frozen=True, slots=True)
class Controller:
    """Everything of a leading controller. ``run`` raises ``StaleTerm`` when another one was elected."""

    loop: Loop
    service: Service
    leadership: Leadership
    term: int

    async def run(self, stop: asyncio.Event) -> None:
        """Lead until ``stop``."""
        stopped = asyncio.create_task(stop.wait(), name="stop")
        leading = [
            asyncio.create_task(self.loop.run(), name="controller loop"),
            asyncio.create_task(self.leadership.run(), name="leadership"),
        ]
        try:
            await asyncio.wait([stopped, *leading], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await end((stopped, *leading))
        for task in leading:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


@contextlib.asynccontextmanager
async def lead(
    settings: Settings,
    identity: str,
    policy: Policy | None = None,
    *,
    standing_by: Callable[[], None] | None = None,
    vault_of: Callable[[StateStore], Vault] | None = None,
) -> AsyncIterator[Controller]:
    """Connect, be elected, take over what is stored, and serve. Everything is closed at the end.

    With ``standing_by`` it waits while another one leads, and tells so once; without, the other one is deposed.
    Raises ``Unavailable`` if NATS or its JetStream is missing, ``InvalidRequest`` for settings that cannot work.
    """
    check(settings)  # else it stands by, and ends when it is to lead
    async with contextlib.AsyncExitStack() as stack:
        bus = await Bus.connect(settings, identity, name="sllm-controller", kind="controller")
        stack.push_async_callback(bus.close)
        # On our own server nothing is set aside for bundles: see ``streams.room_for_bundles``.
        limit = settings.bundle_bytes if settings.nats_store is None else 0
        store = await StateStore.open(bus, create=True, replicas=settings.replicas, bundle_bytes=limit)
        stack.push_async_callback(store.close)
        vault = vault_of(store) if vault_of is not None else DirectoryVault(settings.home / SECRETS)
        # Nodes outlive a store that is lost, or replaced by an older copy, and obey no lower term than they have.
        if standing_by:
            term = await stand_by(store, identity, standing_by, least=_seconds)
        else:
            term = await store.elect(identity, least=_seconds())
        leadership = Leadership(store, bus, identity)
        stack.push_async_callback(leadership.release)
        ledger, nodes = Ledger(store, lambda: shortage(settings.nats_store)), Nodes(bus, store, term, vault)
        async with leadership.taking_over():
            stored = await restore.read(store)
            loop = _take_over(stored, bus, leadership, policy or StartupTime(), ledger, nodes)
            models = Models(loop, ledger, nodes)
            stack.push_async_callback(models.close)
            pulls = Pulls(loop, nodes)
            stack.push_async_callback(pulls.close)
            spreading = Spreading(loop, ledger, nodes, pulls, stored.popularity.models)
            stack.push_async_callback(spreading.close)
            remembering = Remembering(loop, ledger)
            stack.push_async_callback(remembering.close)
            deployments = Deployments(loop, ledger, models, bus, vault)
            stack.push_async_callback(deployments.close)
            deletions = Deletions(loop, bus, deployments.needs)
            stack.push_async_callback(deletions.close)
            sweeps = Sweeps(loop, nodes, deployments, bus)
            stack.push_async_callback(sweeps.close)
            supplying = supplied(settings, stored.pool, loop, ledger)
            stack.push_async_callback(supplying.close)
            stack.callback(bus.on_reconnect(loop.listening_again))
            reports = await bus.subscribe(STATUS_ALL, NodeStatus, loop.heard)
            stack.push_async_callback(reports.unsubscribe)
            presence = Presence(bus, lambda node: node_command(node, "stop"), NOTHING, loop.overdue, loop.left)
            stack.push_async_callback(presence.close)
            service = Service(loop, leadership, bus, models, pulls, spreading, deployments, deletions, vault)
            stack.push_async_callback(service.close)
            await service.open()
            deletions.resume()
            sweeps.start()
            spreading.start()
            remembering.start()
            supplying.start()
            presence.start()
        log.info("leads with term %d: %d function(s)", term, len(loop.view.functions))
        yield Controller(loop, service, leadership, term)


def _seconds() -> int:
    """Since 1970: a term that is none of before, also where the store has none."""
    return int(time.time())


def _take_over(
    stored: restore.Stored, bus: Bus, leadership: Leadership, policy: Policy, ledger: Ledger, nodes: Nodes
) -> Loop:
    view = restore.as_stored(stored, time.monotonic())
    routes = {(route.function, route.version): route for route in stored.routes.values()}
    rng = random.Random(random.SystemRandom().getrandbits(64))

    def may_act() -> bool:
        return bus.connected and leadership.sure

    loop = Loop(view, routes, bus=bus, ledger=ledger, nodes=nodes, policy=policy, rng=rng, may_act=may_act)
    loop.begin(restore.repaired)
    ledger.take(restore.unreferenced(stored, loop.view))
    return loop
