"""``max_queue``: who waits for capacity that is coming, and who is refused."""

import asyncio

from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.node import AWAITS_NODE, Progress
from sllm_runtime.protocol.records import Route
from sllm_runtime.protocol.timeline import Span
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, entry, hang, manifest, world

SSE = {"accept": "text/event-stream"}


async def test_calls_that_an_instance_is_started_for_do_not_queue(nats: Nats) -> None:
    """``max_queue=0``: two instances of one slot may be started, so two calls are served and the third is refused."""
    described = manifest("hang", max_queue=0, concurrency=1, max_instances=2)

    async with world(nats) as w:
        started = [entry("i1", concurrency=1), entry("i2", concurrency=1)]

        async def acquire(request: Acquire) -> Acquired:
            await answer.wait()
            return Acquired(route=Route(function="hang", version=1, manifest=described, entries=tuple(started)))

        answer = asyncio.Event()
        w.controller.on_acquire = acquire
        await w.deploy(described, script=hang)
        served = [asyncio.create_task(w.http.post("/fn/hang", headers=SSE)) for _ in range(2)]
        await until(lambda: w.gateway.calls.dispatcher.waiting("hang") == 2)
        while_starting = await w.http.post("/fn/hang")
        answer.set()
        await until(lambda: len(w.node.runs) == 2, what="both calls got their instance")
        when_full = await w.http.post("/fn/hang")
        for task in served:
            task.cancel()
        await asyncio.wait(served)
        await until(lambda: not len(w.gateway.calls))
    assert [refused.status_code for refused in (while_starting, when_full)] == [429, 429]


async def test_nothing_is_coming_while_the_controller_says_so_and_asking_begins_anew(nats: Nats) -> None:
    """``max_queue=0`` on a full cluster: the first call waits for its own answer, others are refused at once; when
    nobody waits any more the next call asks again."""
    described = manifest("hang", max_queue=0, concurrency=2, queue_timeout=0.6)

    async def full(_: Acquire) -> Acquired:
        return Acquired(pending="no node has room")

    async with world(nats) as w:
        w.controller.on_acquire = full
        await w.deploy(described, script=hang)
        waiting = asyncio.create_task(w.http.post("/fn/hang"))
        await until(lambda: w.gateway.calls.dispatcher.pending(("hang", 1)))
        assert (await w.http.post("/fn/hang")).status_code == 429
        timed_out = await waiting
        assert (timed_out.status_code, timed_out.json()["error"]["code"]) == (503, "queue_timeout")
        assert "no node has room" in timed_out.json()["error"]["message"]
        await until(lambda: not w.gateway.calls.dispatcher.pending(("hang", 1)), what="nobody asks any more")
        assert (await w.http.post("/fn/hang")).json()["error"]["code"] == "queue_timeout"


async def test_who_waits_for_a_node_sees_when_it_is_expected_and_does_not_queue(nats: Nats) -> None:
    """``max_queue=0``: a node that is to come is capacity that is coming."""
    described = manifest("hang", max_queue=0, concurrency=2, max_instances=1)
    told = Progress(stage=AWAITS_NODE, done=20, total=90, unit="s", message="waiting for a node: expected in 70 s")

    asked: list[bool] = []

    async def booting(request: Acquire) -> Acquired:
        asked.append(request.awaits)
        return Acquired(pending=told.message, progress=told)

    async with world(nats) as w:
        w.controller.on_acquire = booting
        await w.deploy(described, script=hang)
        async with w.http.stream("POST", "/fn/hang", headers=SSE) as response:
            events = response.aiter_text()
            text = await anext(events)
            while "\n\n" not in text:
                text += await anext(events)
            assert text.startswith('event: progress\ndata: {"stage":"node","done":20,"total":90,"unit":"s"')
            assert not asked[0], "the first answer is to come at once"
            await until(lambda: asked[-1], what="once it is told, the answer is the node")
            second = asyncio.create_task(w.http.post("/fn/hang"))
            await until(lambda: w.gateway.calls.dispatcher.waiting("hang") == 2)
            second.cancel()
            await asyncio.wait([second])
        await until(lambda: not len(w.gateway.calls))


async def test_of_two_calls_that_wait_for_one_start_the_later_queues_behind_it(nats: Nats) -> None:
    described = manifest("gated", concurrency=1, max_instances=1)
    answer, gate = asyncio.Event(), asyncio.Event()
    stages = (Span("sandbox", 0.0, 0.001), Span("setup", 0.001, 0.001))

    async def gated(run: Run) -> None:
        await gate.wait()
        run.out("done")
        run.end()

    async def acquire(request: Acquire) -> Acquired:
        await answer.wait()
        entries = (entry("i1", concurrency=1, spans=stages),)
        return Acquired(route=Route(function="gated", version=1, manifest=described, entries=entries))

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(described, script=gated)
        calls = [asyncio.create_task(w.http.post("/fn/gated", timeout=GIVE_UP_S)) for _ in range(2)]
        await until(lambda: w.gateway.calls.dispatcher.waiting("gated") == 2)
        answer.set()
        await until(lambda: len(w.node.runs) == 1, what="one of them has the slot")
        gate.set()
        told = [(await each).headers["server-timing"] for each in calls]
    names = sorted([part.partition(";")[0] for part in each.split(", ")] for each in told)
    assert names == [
        ["queue", "sandbox", "setup", "first_token", "tokens"],
        ["queue", "sandbox", "setup", "queue", "first_token", "tokens"],
    ]
