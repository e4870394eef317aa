"""``max_queue``: who waits for capacity that is coming, and who is refused."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from sllm_runtime.platform.owned import end
from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import Draining, NoController
from sllm_runtime.protocol.frames import Opened
from sllm_runtime.protocol.node import AWAITS_NODE, Progress
from sllm_runtime.protocol.records import Route
from sllm_runtime.protocol.timeline import Span
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, entry, hang, manifest, second, world

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
    described = manifest("hang", max_queue=0, concurrency=2, queue_timeout=GIVE_UP_S)

    async def full(_: Acquire) -> Acquired:
        return Acquired(pending="no node has room")

    async with world(nats) as w:
        w.controller.on_acquire = full
        await w.deploy(described, script=hang)
        waiting = asyncio.create_task(w.http.post("/fn/hang"))
        await until(lambda: w.gateway.calls.dispatcher.pending(("hang", 1)))
        assert (await w.http.post("/fn/hang")).status_code == 429
        waiting.cancel()
        await until(lambda: not w.gateway.calls.dispatcher.pending(("hang", 1)), what="nobody asks any more")
        for patience in (0.6, 6.0, 40.0):
            await w.deploy(described.model_copy(update={"queue_timeout": patience}), script=hang)
            timed_out = await w.http.post("/fn/hang")
            assert (timed_out.status_code, timed_out.json()["error"]["code"]) == (503, "queue_timeout")
            if "no node has room" in timed_out.json()["error"]["message"]:
                break  # where the machine stands still its time may be over before the controller's answer
        assert "no node has room" in timed_out.json()["error"]["message"]


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


async def _lines(response: httpx.Response, wanted: str) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if wanted in line:
            yield line


async def test_who_waits_for_the_controller_is_told_so_and_does_not_queue(nats: Nats) -> None:
    """``max_queue=0``: what it will start once it is sure that it leads is capacity that is coming."""
    described = manifest("hang", max_queue=0, concurrency=1, max_instances=2, queue_timeout=60)
    sure = asyncio.Event()

    async def acquire(request: Acquire) -> Acquired:
        if not sure.is_set():
            raise NoController("the controller waits: the store of the state does not answer")
        entries = tuple(entry(name, concurrency=1) for name in ("i1", "i2"))
        return Acquired(route=Route(function="hang", version=1, manifest=described, entries=entries))

    async with world(nats, headers_wait=0.05) as w:
        w.controller.on_acquire = acquire
        await w.deploy(described, script=hang)
        async with w.http.stream("POST", "/fn/hang", headers=SSE) as response:
            found = _lines(response, '"stage":"capacity"')
            why = "waits for the controller (the controller waits: the store of the state does not answer)"
            assert why in await anext(found)
            second = asyncio.create_task(w.http.post("/fn/hang"))
            await until(lambda: w.gateway.calls.dispatcher.waiting("hang") == 2)
            sure.set()
            await until(lambda: len(w.node.runs) == 2, what="both have their instance")
            second.cancel()
            await asyncio.wait([second])
        await until(lambda: not len(w.gateway.calls))


async def test_who_waits_for_room_is_told_why_when_that_changes(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ``/fn`` as an event, on ``/v1`` as a comment, and of a kept call by its status and its events, whichever
    gateway is asked."""
    monkeypatch.setattr("sllm_gateway.events.QUIET_S", 0.02)
    described = manifest("hang", queue_timeout=60, engine=True, model="m")
    asked: list[bool] = []
    reasons = ["all capacity is in use: needs 1 GPU", "waits for calls to end on n1"]
    changed = asyncio.Event()

    async def full(request: Acquire) -> Acquired:
        asked.append(request.pending)
        if request.pending:
            await changed.wait()
        return Acquired(pending=reasons[changed.is_set()])

    async with world(nats, headers_wait=0.05) as w, second(nats) as elsewhere:
        w.controller.on_acquire = full
        await w.deploy(described, script=hang)
        chat = {"model": "hang", "messages": [{"role": "user", "content": "hi"}], "stream": True}
        kept = (await w.http.post("/fn/hang", headers={"prefer": "respond-async"})).json()["id"]
        async with (
            w.http.stream("POST", "/fn/hang", headers=SSE) as events,
            w.http.stream("POST", "/v1/chat/completions", json=chat) as comments,
            elsewhere.stream("GET", f"/v1/calls/{kept}/events") as kept_events,
        ):
            found, said = _lines(events, '"stage":"capacity"'), _lines(comments, ": progress capacity ")
            read = _lines(kept_events, '"stage":"capacity"')
            assert reasons[0] in await anext(found)
            assert reasons[0] in await anext(said)
            assert reasons[0] in await anext(read)
            assert (await w.http.get(f"/v1/calls/{kept}")).json()["waits"] == f"capacity {reasons[0]}"
            explained = w.gateway._recent.here(kept)
            assert explained is not None
            assert explained.waits == f"capacity {reasons[0]}"
            changed.set()
            assert reasons[1] in await anext(found)
            assert reasons[1] in await anext(said)
            assert reasons[1] in await anext(read)
        assert not asked[0], "whoever does not know why asks so"
        assert asked == sorted(asked), "and nobody who knows it"
        assert asked[-1]
        await w.http.post(f"/v1/calls/{kept}/cancel")
        await until(lambda: not len(w.gateway.calls))
        told = await w.told(kept)
    assert [(kind, why) for kind, _, why in told] == [
        ("call.queued", reasons[0]),
        ("call.cancelled", "cancelled on request"),
    ]


async def test_who_waits_behind_all_instances_is_told_so(nats: Nats) -> None:
    """The controller has nothing to say of it: none is wanted beyond ``max_instances``."""
    described = manifest("hang", concurrency=1, max_instances=1, queue_timeout=GIVE_UP_S)
    taken = entry("i1", concurrency=1)
    async with world(nats, headers_wait=0.05) as w:
        await w.deploy(described, taken, script=hang)
        running = asyncio.create_task(w.http.post("/fn/hang", headers=SSE))
        await until(lambda: w.node.runs, what="the only slot is taken")
        for patience in (0.5, 5.0, 40.0):
            await w.deploy(described.model_copy(update={"queue_timeout": patience}), taken)
            behind = await w.http.post("/fn/hang", headers=SSE)
            if behind.status_code == 200:
                break  # where the machine stands still its time may be over before the headers
        running.cancel()
        await asyncio.wait([running])
        await until(lambda: not len(w.gateway.calls))
        told = await w.told()
    assert {kind for kind, _, _ in told} == {"call.queued", "call.failed", "call.cancelled"}
    progress, error = [each for each in behind.text.split("\n\n") if each]
    reason = "all 1 instance(s) that it may have (`max_instances`) are taken"
    assert progress.startswith('event: progress\ndata: {"stage":"capacity"')
    assert reason in progress
    assert error.startswith("event: error")
    assert "queue_timeout" in error
    assert reason in error


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
        calls = [asyncio.create_task(w.http.post("/fn/gated")) for _ in range(2)]
        await until(lambda: w.gateway.calls.dispatcher.waiting("gated") == 2)
        answer.set()
        await until(lambda: len(w.node.runs) == 1, what="one of them has the slot")
        gate.set()
        told = [(await each).headers["server-timing"] for each in calls]
        cold = await w.told()
    assert ("call.cold", "i1") in [(kind, instance) for kind, instance, _ in cold]
    reasons = [why for kind, _, why in cold if kind == "call.queued"]
    assert reasons == ["all 1 instance(s) that it may have (`max_instances`) are taken"], "of the later one, once"
    names = sorted([part.partition(";")[0] for part in each.split(", ")] for each in told)
    assert names == [
        ["queue", "sandbox", "setup", "first_token", "tokens"],
        ["queue", "sandbox", "setup", "queue", "first_token", "tokens"],
    ]


async def test_a_call_that_found_the_start_taken_and_had_another_instance_was_not_cold(nats: Nats) -> None:
    """Another gateway's call was the first at the new instance: this one's had the slot that became free elsewhere."""
    described = manifest("gated", concurrency=1, max_instances=2)
    old, new = entry("i1", concurrency=1), entry("i2", concurrency=1, spans=(Span("sandbox", 0.0, 1.0),))
    gate = asyncio.Event()

    async def gated(run: Run) -> None:
        await gate.wait()
        run.out("done")
        run.end()

    async def acquire(request: Acquire) -> Acquired:
        if "i2" in request.known:
            await asyncio.sleep(request.wait_s)
        return Acquired(route=Route(function="gated", version=1, manifest=described, entries=(old, new)))

    async with world(nats) as w:
        w.node.judge = lambda o: Opened(status="busy" if o.head.instance == "i2" else "accepted")
        w.controller.on_acquire = acquire
        await w.deploy(described, old, script=gated)
        first = asyncio.create_task(w.http.post("/fn/gated"))
        await until(lambda: len(w.node.runs) == 1)
        second = asyncio.create_task(w.http.post("/fn/gated"))
        await until(lambda: any(each.head.instance == "i2" for each in w.node.opened), what="it was refused there")
        gate.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        await until(lambda: len(w.gateway.calls) == 0)
        assert {each.head.instance for each in w.node.opened} == {"i1", "i2"}
        assert not [told for told in await w.told() if told[0] == "call.cold"]
        assert 'sllm_cold_starts_total{function="gated"}' not in (await w.http.get("/metrics")).text
        assert "sandbox" not in (await second).headers["server-timing"]


async def test_a_call_is_cold_once(nats: Nats) -> None:
    """Its instance was told to end before the function saw the call: it went to one that was there."""
    described = manifest("leaves", concurrency=1, max_instances=2)
    old, new = entry("i1", concurrency=1), entry("i2", concurrency=1, spans=(Span("sandbox", 0.0, 1.0),))
    gate = asyncio.Event()

    async def leaves(run: Run) -> None:
        if run.head.instance == "i2":
            return run.end(Draining("this instance is stopping"), unseen=True)
        await gate.wait()
        run.out("done")
        return run.end()

    async def acquire(request: Acquire) -> Acquired:
        if "i2" in request.known or "i2" in request.gone:
            await asyncio.sleep(request.wait_s)
        return Acquired(route=Route(function="leaves", version=1, manifest=described, entries=(old, new)))

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(described, old, script=leaves)
        first = asyncio.create_task(w.http.post("/fn/leaves"))
        await until(lambda: len(w.node.runs) == 1)
        second = asyncio.create_task(w.http.post("/fn/leaves"))
        await until(lambda: any(each.head.instance == "i2" for each in w.node.opened), what="it was there")
        gate.set()
        assert [(await each).status_code for each in (first, second)] == [200, 200]
        await until(lambda: len(w.gateway.calls) == 0)
        assert [told[:2] for told in await w.told() if told[0] == "call.cold"] == [("call.cold", "i2")]


async def test_why_no_more_is_started_is_known_where_some_are_there_and_taken(nats: Nats) -> None:
    """The ordinary full cluster: the answer has the instance that is at work, and why there is no other."""
    why, described = (
        "all capacity is in use: needs 1 GPU",
        manifest("hang", concurrency=1, max_queue=1, queue_timeout=3),
    )
    busy, asked = entry("i1", concurrency=1), list[bool]()

    async def acquire(request: Acquire) -> Acquired:
        asked.append(request.pending)
        if request.pending:
            await asyncio.sleep(request.wait_s)
        return Acquired(
            route=Route(function="hang", version=1, manifest=described, active=True, entries=(busy,)), pending=why
        )

    async with world(nats) as w:
        w.controller.on_acquire = acquire
        await w.deploy(described, busy, script=hang)
        calls = [asyncio.create_task(w.http.post("/fn/hang", headers=SSE))]
        await until(lambda: w.node.runs, what="the only slot is taken")
        calls.append(asyncio.create_task(w.http.post("/fn/hang")))
        await until(lambda: True in asked, what="it is asked on, as who knows why")
        full = await w.http.post("/fn/hang")
        assert full.status_code == 429
        late = (await calls[1]).json()["error"]
        assert late["code"] == "queue_timeout"
        assert why in late["message"]
        assert asked.count(False) == 1
        await end(calls)
        await until(lambda: not len(w.gateway.calls))


async def test_the_controller_hears_that_nobody_waits_any_more_and_that_somebody_does_again(nats: Nats) -> None:
    """Its poll goes on for seconds: what is started meanwhile, and ended for that, would be for nobody."""
    described = manifest("hang", queue_timeout=GIVE_UP_S)

    async def hold(_: Acquire) -> Acquired:
        await asyncio.sleep(4.0)
        return Acquired()

    async with world(nats) as w:
        w.controller.on_acquire = hold
        await w.deploy(described, script=hang)
        told = w.controller.acquires
        caller = asyncio.create_task(w.http.post("/fn/hang", headers=SSE))
        await until(lambda: len(told) == 1)
        caller.cancel()
        await asyncio.wait([caller])
        async with asyncio.timeout(2.0):
            await until(lambda: told[-1].waiting == 0, what="the controller is told")
        again = asyncio.create_task(w.http.post("/fn/hang", headers=SSE))
        async with asyncio.timeout(1.0):
            await until(lambda: told[-1].waiting == 1, what="and of the next one")
        again.cancel()
        await asyncio.wait([again])


@pytest.mark.parametrize("busy", [True, False])
async def test_a_queue_that_is_empty_for_moments_is_told_of_by_one_poll(nats: Nats, busy: bool) -> None:
    """While its call is tried at an instance that is ``busy`` after all; or between the calls of a busy function."""
    described = manifest("quick", queue_timeout=GIVE_UP_S, concurrency=1, max_instances=1)
    polls, served = 0, 0

    async def hold(request: Acquire) -> Acquired:
        nonlocal polls
        polls += request.waiting > 0
        await asyncio.sleep(4.0 if request.waiting else 0.0)
        return Acquired()

    async def quick(run: Run) -> None:
        await asyncio.sleep(0.03)
        run.end()

    async with world(nats) as w:
        w.controller.on_acquire = hold
        if busy:
            w.node.judge = lambda _: Opened(status="busy")
        await w.deploy(described, entry("i1", concurrency=1), script=quick)

        async def calls() -> None:
            nonlocal served
            while (await w.http.post("/fn/quick")).status_code == 200:
                served += 1

        callers = [asyncio.create_task(calls()) for _ in range(1 if busy else 3)]
        await asyncio.sleep(2.0)
        await end(callers)
    assert polls <= 4, f"{served} were served"
    assert busy or served > 10
