"""A name that the route table lacks: the controller is asked before anybody gets 404, and not more than is needed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from sllm_gateway import lookup as lookup_module
from sllm_gateway.controller import Controller
from sllm_gateway.leader import Leader
from sllm_gateway.lookup import ASKING_MOST, UNKNOWN_MOST, Lookup
from sllm_gateway.table import RouteTable
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.ctl import Locate, Located
from sllm_runtime.protocol.errors import FunctionNotFound, Unavailable, VersionNotFound
from sllm_runtime.protocol.records import Route
from tests.fixtures.nats import GATEWAY, GATEWAY_2, NODE, Nats
from tests.unit.control.bench import Gateway, controller_of
from tests.unit.control.scripted_node import ScriptedNode as ControlledNode
from tests.unit.gateway.peer import Run, entry, manifest, world


class Lagging:
    """A gateway's table whose watch delivers when the test says so."""

    def __init__(self) -> None:
        self.table = RouteTable(lambda _: None)
        self.held: list[tuple[str, Route | None]] = []
        self.lags = True

    def apply(self, key: str, route: Route | None) -> None:
        if self.lags:
            self.held.append((key, route))
        else:
            self.table.apply(key, route)

    def catch_up(self) -> None:
        self.lags = False
        for key, route in self.held:
            self.table.apply(key, route)


@contextlib.asynccontextmanager
async def lagging_gateway(nats: Nats, identity: str) -> AsyncIterator[tuple[Lagging, Lookup]]:
    bus = await nats.bus(identity)
    store = await StateStore.open(bus, create=False)
    lagging = Lagging()
    watch = await store.watch(subjects.ROUTE_KEYS, Route, lagging.apply)
    lookup = Lookup(lagging.table, Controller(Leader(bus)), time.monotonic)
    try:
        yield lagging, lookup
    finally:
        await lookup.close()
        await watch.close()


async def test_a_second_gateway_finds_what_was_deployed_a_moment_ago(nats: Nats) -> None:
    """The real controller deploys through one gateway; the other one's watch has told it nothing yet."""
    async with (
        controller_of(nats),
        ControlledNode(await nats.bus(NODE), NODE),
        lagging_gateway(nats, GATEWAY_2) as (lagging, lookup),
    ):
        deployed = await Gateway(await nats.bus(GATEWAY)).deploy(manifest("chat", memory="64MiB"))
        assert deployed.version is not None
        by_name = asyncio.create_task(lookup.find("chat"))
        by_number = asyncio.create_task(lookup.find("chat", 1))
        done, _ = await asyncio.wait([by_name, by_number], timeout=0.2)
        assert not done, "it is deployed: nobody is told otherwise"
        lagging.catch_up()
        assert (await by_name).key == (await by_number).key == ("chat", 1)
        with pytest.raises(VersionNotFound, match="no version 7"):
            await lookup.find("chat", 7)
        with pytest.raises(FunctionNotFound, match="did you mean 'chat'"):
            await lookup.find("chatt")


async def test_a_route_that_does_not_come_is_no_404(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup_module, "ROUTE_WAIT_S", 0.1)
    async with (
        controller_of(nats),
        ControlledNode(await nats.bus(NODE), NODE),
        lagging_gateway(nats, GATEWAY_2) as (_, lookup),
    ):
        await Gateway(await nats.bus(GATEWAY)).deploy(manifest("chat", memory="64MiB"))
        with pytest.raises(Unavailable, match="is deployed, and its route is not here yet"):
            await lookup.find("chat")


async def test_both_kinds_of_routes_ask(nats: Nats) -> None:
    """The call is answered over HTTP though its route is written only when the gateway asks."""

    async def hello(run: Run) -> None:
        run.out("hello")
        run.end()

    async with world(nats) as w:
        described = manifest("late", streams=False)
        w.node.scripts["late"] = hello

        async def locate(request: Locate) -> Located:
            if request.function != "late":
                raise FunctionNotFound(f"no function is named {request.function!r}")
            await w.controller.route(described, entry())
            return Located(version=1)

        await w.controller.serve("locate", Locate, locate)
        assert (await w.http.post("/fn/late")).json() == "hello"
        assert (await w.http.get("/v1/models/late")).status_code == 404  # it is there, and is no language model
        assert (await w.http.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"
        assert (await w.http.post("/fn/other")).json()["error"]["code"] == "function_not_found"


async def test_asking_is_bounded(nats: Nats) -> None:
    """A thousand callers of an unknown name are one question, any number of names few at a time, and what is
    remembered of them is bounded. A controller that is away is not waited for again and again."""
    async with world(nats) as w:
        asked: list[str] = []
        at_once = most = 0

        async def locate(request: Locate) -> Located:
            nonlocal at_once, most
            asked.append(request.function)
            at_once += 1
            most = max(most, at_once)
            await asyncio.sleep(0)
            at_once -= 1
            raise FunctionNotFound("no")

        await w.controller.serve("locate", Locate, locate)
        now = 0.0
        lookup = Lookup(w.gateway.table, Controller(Leader(w.gateway._bus)), lambda: now)
        try:

            async def missing(name: str) -> None:
                with pytest.raises(FunctionNotFound):
                    await lookup.find(name)

            await asyncio.gather(*[missing("typo") for _ in range(1000)])
            await missing("typo")
            await missing("Not/A-Name")
            assert asked == ["typo"]
            now += 1.0
            await missing("typo")
            assert asked == ["typo", "typo"], "what was unknown may be deployed by now"
            await asyncio.gather(*[missing(f"name-{number}") for number in range(2 * UNKNOWN_MOST)])
            assert len(asked) == 2 + 2 * UNKNOWN_MOST
            assert most <= ASKING_MOST
            assert len(lookup._unknown) == UNKNOWN_MOST
        finally:
            await lookup.close()


async def test_without_a_controller_the_table_is_believed(nats: Nats) -> None:
    async with world(nats) as w:  # the scripted controller does not serve this question: nobody answers
        answer = await w.http.post("/fn/unknown")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "function_not_found")
