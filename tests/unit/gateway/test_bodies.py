"""Bodies are bounded together: those of all requests that are being answered."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from sllm_gateway.bodies import Bodies, Share
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.protocol.errors import QueueFull
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, hang, manifest, world

BODY = {"text": "x" * 60_000}


async def test_what_has_no_room_beside_others_comes_again(nats: Nats) -> None:
    go = asyncio.Event()

    async def waits(run: Run) -> None:
        await go.wait()
        run.out(1)
        run.end()

    async with world(nats, bodies=100_000, max_body=100_000) as w:
        await w.deploy(manifest("waits", concurrency=4), entry(), script=waits)
        first = asyncio.create_task(w.http.post("/fn/waits", json=BODY))
        await until(lambda: len(w.node.opened) == 1)
        refused = await w.http.post("/fn/waits", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert refused.headers["retry-after"]
        assert (await w.http.get("/metrics")).text.count(
            'sllm_calls_total{code="queue_full",function="waits"} 1.0'
        ) == 1
        go.set()
        assert (await first).status_code == 200
        for _ in range(3):  # each gives back what it had
            assert (await w.http.post("/fn/waits", json=BODY)).status_code == 200


async def test_who_leaves_gives_back_what_it_had(nats: Nats) -> None:
    async with world(nats, bodies=100_000, max_body=100_000) as w:
        await w.deploy(manifest("waits"), entry(), script=hang)
        bodies = w.gateway._front._bodies
        host, port = w.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer):
            writer.write(b"POST /fn/waits HTTP/1.1\r\nhost: x\r\ncontent-length: 90000\r\n\r\n" + b"x" * 50_000)
            await until(lambda: bodies._nbytes == 50_000)
        await until(lambda: bodies._nbytes == 0)


def test_what_was_refused_is_not_counted() -> None:
    bodies = Bodies(10)
    one, other = Share(bodies), Share(bodies)
    one.take(6)
    with pytest.raises(QueueFull, match="10 B together"):
        other.take(5)
    assert other.refused
    other.close()
    one.close()
    one.close()
    Share(bodies).take(10)


def test_the_largest_body_has_room_in_any_case() -> None:
    given = GatewaySettings(max_body=2**40)
    assert given.all_bodies() == 4 * 2**40
    assert GatewaySettings(max_body=2**20, bodies=1).all_bodies() == 2**20
    assert GatewaySettings(bodies=2**30).all_bodies() == 2**30
