"""What calls take keeps nobody out who looks after them."""

from __future__ import annotations

import asyncio

from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import entry, hang, manifest, world


async def test_calls_that_take_all_do_not_keep_an_operator_out(nats: Nats) -> None:
    async with world(nats, bodies=100_000, max_body=100_000) as w:
        await w.deploy(manifest("waits"), entry(), script=hang)
        first = asyncio.create_task(w.http.post("/fn/waits", json={"text": "x" * 99_980}))
        await until(lambda: len(w.node.opened) == 1)
        answer = await w.http.post("/api/v1/functions/waits/rollback", json={"version": "no number, so never asked"})
        first.cancel()
        assert answer.status_code != 429, answer.text
