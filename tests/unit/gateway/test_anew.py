"""A function that was deleted, or deployed anew, while a call of it has not ended on its node."""

import asyncio
import contextlib

import httpx

from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.frames import Opened
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, World, entry, manifest, world


async def anew(w: World) -> None:
    await w.controller.unroute("f")
    await until(lambda: w.gateway.table.get("f", 1) is None)


async def test_its_limits_are_its_own(nats: Nats) -> None:
    async def does_not_end(run: Run) -> None:
        run.out("begun")

    async with world(nats) as w:
        few = manifest("f", concurrency=1, max_instances=1, max_queue=0)
        await w.deploy(few, entry(concurrency=1), script=does_not_end)
        with contextlib.suppress(httpx.TimeoutException):
            await w.http.post("/fn/f", json={}, timeout=0.5)
        assert len(w.gateway.calls) == 1
        await anew(w)
        await w.deploy(manifest("f", concurrency=1, max_instances=4, max_queue=0, queue_timeout=1.0))
        answers = await asyncio.gather(*(w.http.post("/fn/f", json={}) for _ in range(3)))
        codes = [answer.json()["error"]["code"] for answer in answers]
        assert codes == 3 * ["queue_timeout"], "all three have instances that are to come"


async def test_a_call_of_one_that_was_deleted_ends_when_its_instance_does(nats: Nats) -> None:
    """With retries, or resumable: nothing is there that could go on with it."""

    async def runs(run: Run) -> None:
        await run.cancelled.wait()

    async with world(nats) as w:
        await w.deploy(manifest("f", streams=False, retries=1), entry("i1"), script=runs)
        asked = asyncio.create_task(w.http.post("/fn/f", json={}))
        await until(lambda: len(w.node.runs) == 1)
        await anew(w)
        w.node.judge = lambda _: Opened(status="gone")
        (run,) = w.node.runs.values()
        run.end(InstanceLost("its node is gone"))
        await asyncio.wait({asked}, timeout=2)
        opened = len(w.node.opened)
        for call in w.gateway.calls.open():
            w.gateway.calls.cancel(call.id)
        answer = await asked
        assert (opened, answer.json()["error"]["code"]) == (1, "function_not_found")
