"""The end of a gateway: what is under way has the time that it was given."""

import asyncio
import socket
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import httpx
import pytest

from sllm_gateway.__main__ import serve
from sllm_gateway.server import listen
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.platform.nats_server import free_port
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.http import API
from tests.fixtures.nats import CONTROLLER, GATEWAY, NODE, Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, ScriptedController, ScriptedNode, entry, hang, manifest, world

SSE = {"accept": "text/event-stream"}
UVICORNS_OWN_S = 5.2
"""What it once gave them, whatever the drain."""


async def test_streams_have_the_drain_however_long_that_is(nats: Nats) -> None:
    stopped = asyncio.Event()

    async def ends(run: Run) -> None:
        run.out(0)
        await stopped.wait()
        await asyncio.sleep(UVICORNS_OWN_S + 0.2)
        run.out(1)
        run.end()

    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(nats, drain=GIVE_UP_S))
        await w.deploy(manifest("ends"), entry(), script=ends)
        asked = asyncio.create_task(w.http.post("/fn/ends", json={}, headers=SSE))
        await until(lambda: len(w.node.runs) == 1, what="it runs")
        stopped.set()
    ended = await asked
    assert "data: 1\n\n" in ended.text
    assert ended.text.endswith("data: [DONE]\n\n")


async def test_what_has_not_ended_by_then_is_told_so(nats: Nats) -> None:
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(nats, drain=0.1))
        await w.deploy(manifest("hang"), entry(), script=hang)
        stream = asyncio.create_task(w.http.post("/fn/hang", json={}, headers=SSE))
        whole = asyncio.create_task(w.http.post("/fn/hang", json={}))
        await until(lambda: [run.outbox.acked for run in w.node.runs.values()] == [1, 1], what="they run")
    cut, refused = await asyncio.gather(stream, whole)
    assert '"code":"gateway_stopped"' in cut.text
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "gateway_stopped")


async def test_who_reads_without_end_does_not_hold_it(nats: Nats) -> None:
    """Nor who waits for a whole answer that another gateway goes on with: that one is told so."""
    async with AsyncExitStack() as stack:
        w = await stack.enter_async_context(world(nats, drain=0.1))
        await w.deploy(manifest("hang"), entry(), script=hang)
        following = asyncio.create_task(w.http.get(f"{API}/events?follow=true"))
        kept = asyncio.create_task(w.http.post("/fn/hang", json={}, headers={"idempotency-key": "k"}))
        await until(lambda: len(w.node.runs) == 1, what="it runs")
        began = asyncio.get_running_loop().time()
    assert asyncio.get_running_loop().time() - began < GIVE_UP_S
    with pytest.raises(Exception, match="incomplete chunked read"):
        await following
    answer = await kept
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "gateway_stopped")


async def test_a_gateway_that_drains_tells_how_far_it_is(nats: Nats) -> None:
    """A drain may take an hour: it is not to look dead, and what ends meanwhile is counted where it can be read. No
    call comes there: whoever balances between gateways would be told 503 where it could go to another one."""
    port, metrics = free_port(), free_port()
    fields: dict[str, Any] = {"gateway": GATEWAY, "port": port, "metrics_port": metrics, "drain": GIVE_UP_S}
    settings = GatewaySettings.load(nats.env(GATEWAY), **fields)
    controller, node = ScriptedController(await nats.bus(CONTROLLER)), ScriptedNode(await nats.bus(NODE))
    ends, stop = [asyncio.Event(), asyncio.Event()], asyncio.Event()

    async def waits(run: Run) -> None:
        await ends[len(node.runs) - 1].wait()
        run.out("done")
        run.end()

    node.scripts["f"] = waits
    await controller.start()
    await node.start()
    await controller.route(manifest("f", streams=False), entry())
    told = f"http://127.0.0.1:{metrics}"
    serving = asyncio.create_task(serve(settings, stop))
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", verify=False, timeout=GIVE_UP_S) as http:

        async def answers(url: str) -> bool:
            try:
                return (await http.get(url)).status_code == 200
            except httpx.TransportError:
                return False

        async def refuses() -> bool:
            return not await answers("/livez")

        async def said(line: str) -> bool:
            return line in (await http.get(f"{told}/metrics")).text.splitlines()

        await until(partial(answers, f"{told}/readyz"), what="it is ready")
        await until(partial(answers, "/readyz"), what="calls are taken")
        asked = []
        for count in (1, 2):
            asked.append(asyncio.create_task(http.post("/fn/f", json={})))
            await until(lambda count=count: len(node.runs) == count, what="it runs")  # type: ignore[misc]
        stop.set()
        await until(refuses, what="no call comes any more")
        ready = await http.get(f"{told}/readyz")
        assert (ready.status_code, ready.json()["problem"]) == (503, "it stops: 2 call(s) have not ended")
        assert await said("sllm_ready 0.0")
        assert await answers(f"{told}/livez")
        assert (await http.post(f"{told}/fn/f", json={})).status_code == 404
        ends[0].set()
        assert (await asked[0]).status_code == 200
        await until(partial(said, 'sllm_calls_total{code="ok",function="f"} 1.0'), what="it is counted")
        assert await said("sllm_calls_open 1.0")
        ends[1].set()
        assert (await asked[1]).status_code == 200
        await serving
        assert not await answers(f"{told}/livez")
    await node.close()
    await controller.close()


def test_another_port_that_is_taken_is_named_by_its_own_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InvalidRequest, match="SLLM_METRICS_PORT"):
        listen(GatewaySettings.load({}), taken.getsockname()[1])


def test_callers_that_vanish_are_noticed_while_nothing_is_sent() -> None:
    """Whose network is gone says nothing more, and an answer in one piece is written at its end alone."""
    (made,) = listen(GatewaySettings.load({}, port=0))
    with made as listener, socket.create_connection(listener.getsockname()):
        caller, _ = listener.accept()
        with caller:
            assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert 0 < caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60, "a NAT forgets it after that"
