"""A controller on a real nats-server, with a node that speaks the protocol and a gateway that asks."""

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from sllm_runtime.control.daemon import Controller, lead
from sllm_runtime.control.vault import DirectoryVault
from sllm_runtime.platform import bundles
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import ctl, subjects
from sllm_runtime.protocol.errors import (
    StaleTerm,
)
from sllm_runtime.protocol.events import Event
from sllm_runtime.protocol.manifest import Manifest
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.control.scripted_node import ScriptedNode

READY_S = GIVE_UP_S


def manifest(name: str = "chat", **fields: Any) -> Manifest:
    handler = {"entry": "app:f", "kind": "generator", "streams": True, **fields.pop("handler", {})}
    return Manifest.model_validate({"name": name, "handler": handler, "memory": "64MiB", **fields})


class Gateway:
    """What a gateway asks of the controller."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus

    async def ask(self, verb: str, request: msgspec.Struct, timeout_s: float = 20.0) -> Any:
        return await self.bus.call(subjects.ctl(verb), request, ctl.VERBS[verb][1], timeout_s=timeout_s)

    async def upload(self, data: bytes) -> str:
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"

        async def chunks() -> AsyncIterator[bytes]:
            yield data

        await bundles.store(self.bus, digest, chunks())
        return digest

    async def deploy(self, what: Manifest, data: bytes = b"bundle") -> ctl.Deployed:
        digest = await self.upload(data)
        request = uuid.uuid4().hex
        while True:
            deploy = ctl.Deploy(request=request, manifest=what, bundle=digest, bundle_bytes=len(data), wait_s=2.0)
            deployed: ctl.Deployed = await self.ask("deploy", deploy)
            if deployed.version is not None:
                return deployed

    async def acquire(self, name: str = "chat", version: int = 1, **fields: Any) -> ctl.Acquired:
        request = {"function": name, "version": version, "gateway": "gw", "waiting": 1, "wait_s": 15.0, **fields}
        acquired: ctl.Acquired = await self.ask("acquire", ctl.Acquire(**request))
        return acquired


class Bench:
    """A controller, its node and a gateway."""

    def __init__(
        self, controller: Controller, node: ScriptedNode, gateway: Gateway, store: StateStore, secrets: Path
    ) -> None:
        self.controller, self.node, self.gateway, self.store = controller, node, gateway, store
        self.secrets = secrets

    async def stored(self, key: str, type_: Any) -> Any:
        """What stands there once everything is written that is decided: commands to nodes do not wait for it."""
        await self.controller.loop._ledger.settled(GIVE_UP_S)
        return await self.store.get(key, type_)

    def live(self) -> list[str]:
        return [name for name, instance in self.controller.loop.view.instances.items() if not instance.ended]

    async def none_left(self) -> None:
        await until(lambda: not self.live(), what="no instance is left")


def secrets_of(nats: Nats) -> Path:
    """Where its controllers keep them."""
    return nats.server.directory.with_name("secrets")


@contextlib.asynccontextmanager
async def controller_of(nats: Nats, identity: str = "ctl") -> AsyncIterator[Controller]:
    stop = asyncio.Event()
    async with lead(
        nats.settings(identity), identity, vault_of=lambda _: DirectoryVault(secrets_of(nats))
    ) as controller:
        running = asyncio.create_task(controller.run(stop))
        try:
            yield controller
        finally:
            stop.set()
            with contextlib.suppress(StaleTerm):
                await running


async def has_events(bench: Bench, kinds: set[str]) -> bool:
    """Whether events of all these kinds are stored."""
    return kinds <= {event.kind for event in await stored_events(bench)}


async def stored_events(bench: Bench) -> list[Event]:
    """All of them."""
    js = bench.controller.loop._bus.jetstream
    count = (await js.stream_info(subjects.EVENTS_STREAM)).state.messages
    stored = [await js.get_msg(subjects.EVENTS_STREAM, number) for number in range(1, count + 1)]
    return [msgspec.msgpack.decode(message.data or b"", type=Event) for message in stored]
