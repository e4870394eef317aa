"""The route table against a real store, through what its watch does not see."""

import asyncio
from typing import Any

import pytest

from sllm_gateway.table import RouteTable, Version
from sllm_runtime.platform import watch as watching
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.records import Route
from tests.fixtures.nats import CONTROLLER, GATEWAY, Nats
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.gateway.peer import manifest

KEY = subjects.route_key("chat", 1)


def takes(name: str, created: float) -> Route:
    """Of a version whose calls have one argument of that name."""
    schema: dict[str, object] = {"type": "object", "properties": {name: {"type": "string"}}, "required": [name]}
    schema["additionalProperties"] = False
    what = manifest("chat", input_schema=schema)
    return Route(function="chat", version=1, manifest=what, active=True, created=created)


async def followed(nats: Nats, table: RouteTable) -> tuple[StateStore, watching.Watch]:
    """Who writes the state, with a function in it, and a gateway's watch."""
    leader = await nats.store(CONTROLLER)
    await leader.elect(CONTROLLER)
    await leader.put(KEY, takes("prompt", 1.0))
    store = await StateStore.open(await nats.bus(GATEWAY), create=False)
    return leader, await store.watch(subjects.ROUTE_KEYS, Route, table.apply)


async def test_a_function_that_was_deleted_and_deployed_anew_meanwhile_is_another_one(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counts its versions anew. Of both this gateway sees, after an outage of its own, the last one alone."""
    changed = list[tuple[Version, bool]]()
    table = RouteTable(lambda version: changed.append((version, version.removed)))
    leader, watch = await followed(nats, table)
    before = table.find("chat")
    await before.arguments.check(b'{"prompt": "x"}')
    again, real = asyncio.Event(), watching._Picture.open

    async def away(self: Any) -> None:
        await again.wait()
        await real(self)

    monkeypatch.setattr(watching._Picture, "open", away)
    watch._anew()
    await leader.delete(KEY)
    await leader.put(KEY, takes("text", 2.0))
    again.set()
    await asyncio.wait_for(watch.synced.wait(), GIVE_UP_S)
    await table.find("chat").arguments.check(b'{"text": "x"}')
    assert (before, True) in changed, "who waits for the one before is told"
    await watch.close()


async def test_a_server_that_lags_takes_no_function_away(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three servers any may have the consumer that is made after an outage, also one that has nothing yet."""
    changed = list[tuple[Version, bool]]()
    table = RouteTable(lambda version: changed.append((version, version.removed)))
    _, watch = await followed(nats, table)
    found, lags = table.find("chat"), ["once"]
    opened = watching._Picture.open

    async def lagging(self: Any) -> None:
        await opened(self)
        if lags:
            lags.pop()
            self.pending = 0  # what it has not got yet it does not announce; it comes later, as news

    monkeypatch.setattr(watching._Picture, "open", lagging)
    watch._anew()
    await asyncio.wait_for(watch.synced.wait(), GIVE_UP_S)
    assert not lags
    assert not found.removed, "calls that wait for it ended with function_not_found"
    assert table.find("chat") is found
    await watch.close()
