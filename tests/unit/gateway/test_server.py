"""The end of a gateway: what is under way has the time that it was given."""

import asyncio
import socket
from contextlib import AsyncExitStack

import pytest

from sllm_gateway.server import listen
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.protocol.http import API
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, entry, hang, manifest, world

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


def test_callers_that_vanish_are_noticed_while_nothing_is_sent() -> None:
    """Whose network is gone says nothing more, and an answer in one piece is written at its end alone."""
    with listen(GatewaySettings.load({}, port=0)) as listener, socket.create_connection(listener.getsockname()):
        caller, _ = listener.accept()
        with caller:
            assert caller.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert 0 < caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) < 60, "a NAT forgets it after that"
