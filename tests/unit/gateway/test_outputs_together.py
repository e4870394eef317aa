"""Answers that are not streamed: each is bounded, and so is what all of them take together."""

import asyncio
from typing import Any

import pytest

from sllm_gateway import settings as settings_module
from sllm_gateway.events import EventWriter
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.frames import FrameKind, Ids
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, manifest, world
from tests.unit.gateway.test_kept_calls import ASYNC, engine, reaches

MIB = 2**20
MEMORY = 16 * MIB
CALLS = 12


async def test_many_large_answers_take_a_part_of_the_memory(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is smaller than the largest; together they would be more than the machine has."""
    monkeypatch.setattr(settings_module, "memory", lambda: MEMORY)
    said, go_on = 0, asyncio.Event()

    async def large(run: Run) -> None:
        nonlocal said
        for _ in range(7):
            run.out("x" * (MIB // 8))
            await asyncio.sleep(0)
        said += 1
        await go_on.wait()
        if not run.cancelled.is_set():
            run.end()

    async with world(nats, max_output=MIB) as w:
        await w.deploy(manifest("large"), entry(), script=large)
        asked = [asyncio.create_task(w.http.post("/fn/large", json={})) for _ in range(CALLS)]
        await until(lambda: said == CALLS, what="all have said what they have")
        await asyncio.sleep(0.5)
        held = sum(len(frame.data) for call in w.gateway.calls._open.values() for frame in call.frames)
        go_on.set()
        answers = [await each for each in asked]
        assert held <= max(MEMORY // 4, 4 * MIB), f"{held / MIB:.1f} MiB"
        codes = {each.status_code: each.json() for each in answers if each.status_code != 200}
        assert codes[500]["error"]["code"] == "output_too_large"
        assert sum(each.status_code == 200 for each in answers) >= 3
        whole = await w.http.post("/fn/large", json={})
        assert whole.status_code == 200, "what was collected for others is given back"


async def test_small_pieces_are_bounded_together_by_what_they_take(nats: Nats) -> None:
    go_on = asyncio.Event()
    said = 0

    async def small(run: Run) -> None:
        nonlocal said
        for _ in range(6000):
            run.out(1)
        said += 1
        await go_on.wait()
        run.end()

    async with world(nats, max_output=MIB // 4, outputs=MIB) as w:
        await w.deploy(manifest("small"), entry(), script=small)
        asked = [asyncio.create_task(w.http.post("/fn/small", json={})) for _ in range(10)]
        await until(lambda: said == 10, what="all have said what they have")
        await asyncio.sleep(0.5)
        calls = list(w.gateway.calls._open.values())
        cost = sum(c.buffered for c in calls if c.frames)
        n = sum(len(c.frames) for c in calls)
        go_on.set()
        codes = [each.status_code for each in [await each for each in asked]]
        assert cost <= MIB, f"{n} frames are held"
        assert set(codes) == {200, 500}
        assert w.gateway.calls._open.collected == 0


async def test_what_was_thrown_away_takes_no_room(nats: Nats) -> None:
    """It waits for an instance again: the half that it had is not here any more."""
    died = manifest("died", streams=False, retries=1, concurrency=1)

    async def half(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        run.end(InstanceLost("it died"))

    async def whole(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        run.end()

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        w.gateway.calls._delivery._all_outputs = MIB + MIB // 2
        await w.deploy(died, entry("i1", concurrency=1), script=half)
        await w.deploy(manifest("other"), entry("i9"), script=whole)
        asked = asyncio.create_task(w.http.post("/fn/died", json={}))
        await until(lambda: any(call.attempts == 1 and call.binding is None for call in w.gateway.calls.open()))
        assert not any(call.frames for call in w.gateway.calls.open())
        answer = await w.http.post("/fn/other", json={})
        asked.cancel()
        assert answer.status_code == 200, answer.text


async def test_kept_answers_are_bounded_together_too(nats: Nats) -> None:
    """Who reads one that is kept, whole, has as much of it here."""
    said, go_on = 0, asyncio.Event()

    async def large(run: Run) -> None:
        nonlocal said
        for _ in range(7):
            run.out("x" * (MIB // 8))
            await asyncio.sleep(0)
        said += 1
        await go_on.wait()
        run.end()

    async def ask(key: str) -> int:
        return (await w.http.post("/fn/large", json={}, headers={"Idempotency-Key": key})).status_code

    async with world(nats, max_output=MIB, outputs=MIB) as w:
        await w.deploy(manifest("large"), entry(), script=large)
        asked = [asyncio.create_task(ask(str(number))) for number in range(CALLS)]
        await until(lambda: any(each.done() for each in asked), what="one is too much")
        assert w.gateway.calls._open.collected <= 4 * MIB
        go_on.set()
        assert {await each for each in asked} == {200, 500}
        await until(lambda: not w.gateway.calls._open.collected, what="what was read is given back")
        assert await ask("alone") == 200


async def test_results_shown_with_states_are_bounded_too(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, held = asyncio.Event(), 0
    write = EventWriter.whole

    async def slow(self: EventWriter, scope: Any, send: Any, headers: Any, body: bytes) -> None:
        """Callers that take nothing for a while."""
        nonlocal held
        held += len(body)
        await go_on.wait()
        await write(self, scope, send, headers, body)

    async def large(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        run.end()

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(manifest("large"), entry(), script=large)
        call = (await w.http.post("/fn/large", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        monkeypatch.setattr(EventWriter, "whole", slow)
        asked = [asyncio.create_task(w.http.get(f"/v1/calls/{call}")) for _ in range(10)]
        await until(lambda: held > MIB, what="they are shown, or not")
        await asyncio.sleep(0.5)
        go_on.set()
        answers = [await each for each in asked]
        assert held <= 4 * MIB, f"{held / MIB:.1f} MiB are held"
        assert {each.status_code for each in answers} == {200}
        assert {each.json()["state"] for each in answers} == {"SUCCEEDED"}
        codes = [(each.json()["error"] or {}).get("code") for each in answers]
        assert set(codes) == {None, "output_too_large"}
        assert w.gateway.calls._open.collected == 0


async def test_half_a_value_that_was_dropped_takes_no_room(nats: Nats) -> None:
    died = engine("died").model_copy(update={"concurrency": 1})

    async def half(run: Run) -> None:
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (0,))))
        for _ in range(7):
            run.outbox.push(FrameKind.OUTPUT, b"x" * (MIB // 8), more=True)
        run.node.flush(run)
        run.end(InstanceLost("it died"))

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(died, entry("i1", fingerprint="f", concurrency=1), script=half)
        asked = asyncio.create_task(w.http.post("/fn/died", json={}))
        await until(
            lambda: any(call.attempts == 1 and call.binding is None for call in w.gateway.calls.open()),
            what="it waits again",
        )
        (call,) = w.gateway.calls.open()
        held = sum(f.cost for f in call.frames)
        collected = w.gateway.calls._open.collected
        asked.cancel()
        assert collected == held


async def test_what_its_caller_left_takes_no_room(nats: Nats) -> None:
    """Its node has yet to confirm the end: a function that is slow to hear of it holds nothing here."""
    go_on = asyncio.Event()

    async def deaf(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        await go_on.wait()
        run.end()

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(manifest("deaf"), entry(), script=deaf)
        asked = asyncio.create_task(w.http.post("/fn/deaf", json={}))
        await until(lambda: w.gateway.calls._open.collected > 7 * MIB // 8, what="it is here")
        asked.cancel()
        await until(lambda: w.node.cancels, what="its node is told")
        collected, frames = w.gateway.calls._open.collected, [len(c.frames) for c in w.gateway.calls._open.values()]
        go_on.set()
        assert (collected, frames) == (0, [0])
