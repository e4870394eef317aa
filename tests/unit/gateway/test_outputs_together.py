"""Answers that are not streamed: each is bounded, and so is what all of them take together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from sllm_gateway import settings as settings_module
from sllm_gateway.detached import Detached
from sllm_gateway.events import EventWriter
from sllm_gateway.journal import Journal
from sllm_gateway.replay import Whole
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.calls import Entry
from sllm_runtime.protocol.errors import InstanceLost
from sllm_runtime.protocol.frames import FrameKind, Ids
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import GIVE_UP_S, until
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


async def test_values_that_journals_gather_are_bounded_together_too(nats: Nats) -> None:
    """A kept call's value that comes in parts waits here until it is whole: what a function answers that is no
    generator comes as one."""
    said, go_on = 0, asyncio.Event()

    async def large(run: Run) -> None:
        nonlocal said
        for number in range(7):
            run.outbox.push(FrameKind.OUTPUT, b"x" * (MIB // 8) if number else b'"', more=True)
            run.node.flush(run)
            await asyncio.sleep(0)
        said += 1
        await go_on.wait()
        if not run.cancelled.is_set():
            run.outbox.push(FrameKind.OUTPUT, b'"')
            run.node.flush(run)
            run.end()

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(manifest("large", streams=False), entry(), script=large)
        begun = [await w.http.post("/fn/large", json={}, headers=ASYNC) for _ in range(CALLS)]
        await until(lambda: said == CALLS, what="all have said what they have")
        await asyncio.sleep(0.5)
        open_ = list(w.gateway.calls._open.values())
        held = sum(len(frame.data) for call in open_ for frame in (*call.held, *call.frames))
        go_on.set()
        ends: list[dict[str, Any]] = []

        async def ended() -> bool:
            ends[:] = [(await w.http.get(each.headers["location"])).json() for each in begun]
            return all(each["state"] in ("SUCCEEDED", "FAILED") for each in ends)

        await until(ended, what="all have ended")
        assert held <= 3 * MIB, f"{held / MIB:.1f} MiB are held"
        assert sum(each["state"] == "SUCCEEDED" for each in ends) >= 3
        assert {each["error"]["code"] for each in ends if each["error"]} == {"output_too_large"}
        await until(lambda: not w.gateway.calls._open.collected, what="what is written is given back")


async def test_what_came_of_a_call_that_has_failed_takes_no_room_once_its_caller_is_told(nats: Nats) -> None:
    """Its function hangs: it hears of the end no sooner than it is killed."""
    go_on = asyncio.Event()

    async def hangs(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        await go_on.wait()
        run.end()

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(manifest("hangs", idle_timeout=1.0), entry(), script=hangs)
        answer = await w.http.post("/fn/hangs", json={})
        collected, frames = w.gateway.calls._open.collected, [len(c.frames) for c in w.gateway.calls._open.values()]
        go_on.set()
        assert answer.status_code == 504, answer.text
        assert (collected, frames) == (0, [0])


async def test_half_a_value_of_a_kept_call_that_has_failed_takes_no_room_while_its_end_is_written(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream may have no leader for as long as it likes: nobody will have that value."""
    ended, go_on, write = asyncio.Event(), asyncio.Event(), Detached.end

    async def late(self: Detached, *args: Any) -> None:
        ended.set()
        await go_on.wait()
        await write(self, *args)

    async def hangs(run: Run) -> None:
        for number in range(7):
            run.outbox.push(FrameKind.OUTPUT, b"x" * (MIB // 8) if number else b'"', more=True)
            run.node.flush(run)
            await asyncio.sleep(0)

    monkeypatch.setattr(Detached, "end", late)
    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(manifest("hangs", streams=False, idle_timeout=1.0), entry(), script=hangs)
        assert (await w.http.post("/fn/hangs", json={}, headers=ASYNC)).status_code == 202
        await asyncio.wait_for(ended.wait(), GIVE_UP_S)
        collected = w.gateway.calls._open.collected
        held = sum(len(frame.data) for call in w.gateway.calls._open.values() for frame in (*call.held, *call.frames))
        go_on.set()
        assert (collected, held) == (0, 0)


async def test_to_ask_how_calls_stand_that_have_not_ended_takes_no_room(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of what came so far is shown: who asks is not to be why another call has no room for its answer."""
    read, asked_on, go_on = Journal.entries, asyncio.Event(), asyncio.Event()
    said, known = 0, 0

    async def runs(run: Run) -> None:
        nonlocal said
        for _ in range(7):
            run.out("x" * (MIB // 8))
        said += 1
        await go_on.wait()
        run.end()

    async def large(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        run.end()

    async def slow(journal: Journal, stream: str, call: str) -> AsyncGenerator[Entry | None, None]:
        """JetStream has not said yet that this is all."""
        nonlocal known
        async with aclosing(read(journal, stream, call)) as found:
            async for each in found:
                if each is None:
                    known += 1
                    await asked_on.wait()
                yield each

    async with world(nats, max_output=MIB, outputs=3 * MIB) as w:
        await w.deploy(manifest("runs"), entry(), script=runs)
        await w.deploy(manifest("large"), entry("i9"), script=large)
        calls = [(await w.http.post("/fn/runs", json={}, headers=ASYNC)).json()["id"] for _ in range(4)]
        await until(lambda: said == 4 and not any(c.frames for c in w.gateway.calls.open()), what="it is written")
        monkeypatch.setattr(Journal, "entries", slow)
        asked = [asyncio.create_task(w.http.get(f"/v1/calls/{call}")) for call in calls]
        await until(lambda: known >= 3 or all(each.done() for each in asked), what="how they stand is asked")
        other = await w.http.post("/fn/large", json={})
        asked_on.set()
        states = [(await each).json() for each in asked]
        go_on.set()
        assert other.status_code == 200, other.text
        assert [(each["state"], each["result"]) for each in states] == [("RUNNING", None)] * 4


@pytest.mark.parametrize("how", ["whole", "shown with its state"])
async def test_a_kept_answer_is_held_once_while_it_is_written(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """A reader may take half a minute for it: what it was made of is not held beside it for as long."""
    found, held, write, made = list[Whole](), list[int](), EventWriter.whole, Whole.__init__

    def making(self: Whole, most: int) -> None:
        made(self, most)
        found.append(self)

    async def writing(self: EventWriter, scope: Any, send: Any, headers: Any, body: bytes) -> None:
        held.append(sum(len(frame.data) for frame in found[-1]._frames))
        await write(self, scope, send, headers, body)

    async def large(run: Run) -> None:
        for _ in range(7):
            run.out("x" * (MIB // 8))
        run.end()

    async with world(nats, max_output=MIB) as w:
        await w.deploy(manifest("large"), entry(), script=large)
        monkeypatch.setattr(Whole, "__init__", making)
        monkeypatch.setattr(EventWriter, "whole", writing)
        if how == "whole":
            assert (await w.http.post("/fn/large", json={}, headers={"Idempotency-Key": "k"})).status_code == 200
        else:
            call = (await w.http.post("/fn/large", json={}, headers=ASYNC)).json()["id"]
            await reaches(w.http, call, "SUCCEEDED")
        assert held
        assert held[-1] == 0, f"{held[-1] / MIB:.2f} MiB of its pieces are held beside it"
