"""A call whose first instance dies, and that begins again at one whose start it waits for, is a cold one."""

import asyncio

from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import FunctionError, InstanceLost
from sllm_runtime.protocol.frames import Opened
from sllm_runtime.protocol.records import Route
from sllm_runtime.protocol.timeline import Span
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, manifest, world


async def test_a_call_that_begins_again_cold_says_so(nats: Nats) -> None:
    described = manifest("f", streams=False, retries=1, concurrency=1, max_instances=2)

    async def runs(run: Run) -> None:
        if run.head.instance == "i1":
            await run.cancelled.wait()
        run.out("done")
        run.end()

    async def acquire(request: Acquire) -> Acquired:
        await asyncio.sleep(0.05)
        return Acquired(route=Route(function="f", version=1, manifest=described, entries=(entry("i2", concurrency=1),)))

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(described, entry("i1", concurrency=1), script=runs)
        asked = asyncio.create_task(w.http.post("/fn/f", json={}))
        await until(lambda: len(w.node.runs) == 1, what="the warm one has it")
        (run,) = w.node.runs.values()
        run.end(InstanceLost("it died"))
        answer = await asked
        assert answer.status_code == 200, answer.text
        told = [(kind, instance) for kind, instance, _ in await w.told()]
        metrics = (await w.http.get("/metrics")).text
    assert 'sllm_cold_starts_total{function="f"} 1.0' in metrics
    assert ("call.cold", "i2") in told


async def test_one_start_is_told_once_however_often_the_call_begins_again(nats: Nats) -> None:
    described = manifest("f", streams=False, retries=2, concurrency=1)

    async def runs(run: Run) -> None:
        if len(w.node.runs) < 3:
            run.end(FunctionError("it raised"))
            return
        run.out("done")
        run.end()

    async def acquire(request: Acquire) -> Acquired:
        return Acquired(route=Route(function="f", version=1, manifest=described, entries=(entry("i1", concurrency=1),)))

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(described, script=runs)
        answer = await w.http.post("/fn/f", json={})
        assert answer.status_code == 200, answer.text
        assert len(w.node.runs) == 3
        told = [(kind, instance) for kind, instance, _ in await w.told()]
    assert told.count(("call.cold", "i1")) == 1


async def test_a_start_that_did_not_take_a_call_that_begins_again_is_not_shown_as_its_own(nats: Nats) -> None:
    described = manifest("f", streams=False, retries=2, concurrency=1, max_instances=3)
    old = entry("i0", concurrency=1)
    one = entry("i1", concurrency=1, spans=(Span("sandbox", 0.0, 1.0),))
    two = entry("i2", concurrency=1, spans=(Span("weights", 0.0, 1.0),))
    gate = asyncio.Event()

    async def runs(run: Run) -> None:
        if run.head.instance == "i1":
            run.end(InstanceLost("it died"))
            return
        await gate.wait()
        run.out("done")
        run.end()

    async def acquire(request: Acquire) -> Acquired:
        started = [o.head.instance for o in w.node.opened]
        if "i2" in started:
            await asyncio.sleep(request.wait_s)
        entries = (old, two) if "i1" in started else (old, one)
        return Acquired(route=Route(function="f", version=1, manifest=described, entries=entries))

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        w.node.judge = lambda o: Opened(status="busy" if o.head.instance == "i2" else "accepted")
        await w.deploy(described, old, script=runs)
        first = asyncio.create_task(w.http.post("/fn/f", json={}))
        await until(lambda: len(w.node.runs) == 1, what="the warm one has the first")
        second = asyncio.create_task(w.http.post("/fn/f", json={}))
        await until(lambda: any(o.head.instance == "i2" for o in w.node.opened), what="asked there")
        gate.set()
        await first
        answer = await second
        assert "weights" not in answer.headers["server-timing"]
