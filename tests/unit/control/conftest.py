from collections.abc import AsyncIterator

import pytest

from sllm_runtime.platform.state import StateStore
from tests.fixtures.nats import Nats, nats
from tests.unit.control.bench import Bench, Gateway, controller_of, secrets_of
from tests.unit.control.scripted_node import ScriptedNode

__all__ = ["bench", "nats", "node"]


@pytest.fixture
async def node(nats: Nats) -> AsyncIterator[ScriptedNode]:
    async with ScriptedNode(await nats.bus("n1"), "n1") as node:
        yield node


@pytest.fixture
async def bench(nats: Nats, node: ScriptedNode) -> AsyncIterator[Bench]:
    async with controller_of(nats) as controller:
        gateway = Gateway(await nats.bus("gw"))
        store = await StateStore.open(gateway.bus, create=False)
        yield Bench(controller, node, gateway, store, secrets_of(nats))
