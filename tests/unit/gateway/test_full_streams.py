"""What is kept of calls fills its streams, or a key lapses: real NATS with small limits, a scripted node."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_gateway import detached, journal, stored
from sllm_gateway.journal import Journal
from sllm_gateway.room import Level, Room
from sllm_gateway.stored import Stored
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.calls import Batch, Began, BodyPart, CallOrder, Ended, Entry, KeyClaim
from sllm_runtime.protocol.errors import CallMoved, Conflict, JournalExpired, StoreFull
from sllm_runtime.protocol.limits import KIB, MAX_BODY, MAX_PART, MIB
from sllm_runtime.protocol.lives import LIVES_AGE_S
from sllm_runtime.protocol.states import CallState
from sllm_runtime.protocol.subjects import (
    BODIES_STREAM,
    CALLS_STREAM,
    JOURNAL_STREAM,
    KEYS_STREAM,
    LIVES_STREAM,
    call_entry,
    life_beat,
)
from tests.fixtures.nats import CONTROLLER, GATEWAY, GATEWAY_2, Nats
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, entry, manifest, second, world
from tests.unit.gateway.test_kept_calls import ASYNC, Gate, count, events_of, key, reaches, state_of, written
from tests.unit.gateway.test_succession import asked


async def limit(bus: Bus, stream: str, nbytes: int) -> None:
    """Of a stream, from now on."""
    config = (await bus.jetstream.stream_info(stream)).config
    await bus.jetstream.update_stream(config.evolve(max_bytes=nbytes))


async def held(bus: Bus, stream: str) -> int:
    return (await bus.jetstream.stream_info(stream)).state.bytes


def journal_of(bus: Bus) -> Journal:
    return Journal(bus, Stored(bus))


async def drop(bus: Bus, stream: str, subject: str) -> None:
    """As a full stream does that discards the oldest, or one whose message's time is over."""
    await bus.jetstream.purge_stream(stream, subject=subject)


# --- what a stream takes --------------------------------------------------------------------------
@given(st.lists(st.integers(1, MAX_BODY), max_size=200))
def test_no_bodies_leave_no_room_for_smaller_ones(bodies: list[int]) -> None:
    used, most = 0, 5 * MAX_BODY
    for nbytes in bodies:
        if Level(used, most).takes(nbytes):
            used += nbytes
        assert Level(used, most).takes((most - used) // 2)
    assert used < most


def test_four_of_the_largest_bodies_have_room() -> None:
    taken = [Level(number * MAX_BODY, 5 * MAX_BODY).takes(MAX_BODY) for number in range(5)]
    assert taken == [True, True, True, True, False]
    assert Level(1 << 60, -1).takes(MAX_BODY, 1.0), "a stream without a limit"


async def test_a_stream_is_looked_at_once_a_second_until_it_fills(nats: Nats) -> None:
    bus, writer = await nats.streams(), await nats.bus(GATEWAY)
    await limit(bus, KEYS_STREAM, 64 * KIB)
    now = 0.0
    room = Room(Stored(writer), lambda: now)
    await room.require(KEYS_STREAM, 0)
    for number in range(31):
        await writer.jetstream.publish(subjects.key_claim(str(number)), b"x" * 2000)
    await room.require(KEYS_STREAM, 0)  # as it was
    now = 1.0
    with pytest.raises(StoreFull, match=r"sllm_keys holds 0\.1 of 0\.1 MiB"):
        await room.require(KEYS_STREAM, 0, 1 / 8)
    await bus.jetstream.purge_stream(KEYS_STREAM)
    await room.require(KEYS_STREAM, 0, 1 / 8)


# --- bodies ---------------------------------------------------------------------------------------
def body(nbytes: int) -> dict[str, str]:
    return {"text": "x" * nbytes}


async def test_large_bodies_leave_keys_journals_and_small_ones_their_room_and_are_given_back(nats: Nats) -> None:
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        bus = w.controller.bus
        await limit(bus, BODIES_STREAM, 4 * MIB)
        begun: list[str] = []
        for _ in range(4):
            answer = await w.http.post("/fn/gate", json=body(3 * MIB // 2), headers=ASYNC)
            if answer.status_code != 202:
                break
            begun.append(answer.json()["id"])
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["retryable"]) == (503, "store_full", True)
        assert BODIES_STREAM in error["message"]
        assert len(begun) == 1
        small = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("small")))
        await until(lambda: len(gate.runs) == len(begun) + 1, what="a small one runs")
        gate.opened.set()
        assert (await small).json() == [0, 1]
        for call in begun:
            await reaches(w.http, call, "SUCCEEDED")

        async def given_back() -> bool:
            return await held(bus, BODIES_STREAM) < 64 * KIB

        await until(given_back, what="the bodies are given back")
        assert (await w.http.post("/fn/gate", json=body(3 * MIB // 2), headers=ASYNC)).status_code == 202


async def test_a_body_that_was_not_begun_is_given_back(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused in the middle: more came meanwhile than was there when it was asked for."""

    async def no_look(*_: Any, **__: Any) -> None:
        pass

    monkeypatch.setattr(Room, "require", no_look)
    monkeypatch.setattr(stored, "ELECTION_S", 2 * GIVE_UP_S)  # JetStream says why: it is not tried for so long
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        bus = w.controller.bus
        await limit(bus, BODIES_STREAM, MIB)
        for _ in range(2):
            answer = await w.http.post("/fn/count", json={"n": 1, **body(2 * MIB)}, headers=ASYNC)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_full")

            async def given_back() -> bool:
                return await held(bus, BODIES_STREAM) < 64 * KIB

            await until(given_back, what="what was written of it is given back")
        assert not w.node.runs
        assert (await w.http.get("/v1/calls")).json()["calls"] == []


# --- answers --------------------------------------------------------------------------------------
async def flood(run: Run) -> None:
    """64 KiB a value, until it is cancelled."""
    while not run.cancelled.is_set():
        run.out("x" * 64 * KIB)
        await run.room()
        await asyncio.sleep(0)
    run.end()


@pytest.mark.parametrize("how", ["cancelled", "its time is over"])
async def test_a_full_stream_takes_no_new_call_and_the_ends_of_those_that_run(nats: Nats, how: str) -> None:
    """An answer waits for room; what has failed has none that anybody waits for."""
    async with world(nats) as w:
        await w.deploy(manifest("flood", timeout=300 if how == "cancelled" else 3), entry(), script=flood)
        await limit(w.controller.bus, CALLS_STREAM, 8 * MIB)
        call = (await w.http.post("/fn/flood", json={}, headers=ASYNC)).json()["id"]

        async def refused() -> httpx.Response | None:
            answer = await w.http.post("/fn/flood", json={}, headers=ASYNC)
            if answer.status_code == 202:
                await w.http.post(f"/v1/calls/{answer.json()['id']}/cancel")
            return answer if answer.status_code == 503 else None

        await until(refused, what="no new call is taken")
        answer = await w.http.post("/fn/flood", json={}, headers=ASYNC)
        assert answer.json()["error"]["code"] == "store_full"
        assert CALLS_STREAM in answer.json()["error"]["message"]
        if how == "cancelled":
            assert (await w.http.post(f"/v1/calls/{call}/cancel")).status_code == 202
            await reaches(w.http, call, "CANCELLED")
        else:
            assert (await reaches(w.http, call, "FAILED"))["error"]["code"] == "deadline_exceeded"
        assert await held(w.controller.bus, CALLS_STREAM) < 7.5 * MIB, "an eighth, but for envelopes, is for ends"


@pytest.mark.parametrize("how", ["cancelled", "its time is over", "its gateway stops"])
async def test_a_call_has_not_succeeded_before_all_of_its_answer_is_stored(nats: Nats, how: str) -> None:
    """Its instance has said all of it, and has ended."""
    gone: list[str] = []

    async def says(run: Run) -> None:
        run.out("x" * 12 * MIB)
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("says", timeout=3 if how == "its time is over" else 300), entry(), script=says)
        await limit(w.controller.bus, CALLS_STREAM, 8 * MIB)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        await until(lambda: (found := w.gateway.calls.get(call)) is not None and found.over, what="all of it has come")
        w.gateway._news.tell = lambda kind, *_, **__: gone.append(kind)  # type: ignore[method-assign]
        assert (await state_of(w.http, call))["state"] == "RUNNING"
        listed = (await w.http.get("/v1/calls", params={"state": "RUNNING"})).json()["calls"]
        assert [each["id"] for each in listed] == [call]
        if how == "cancelled":
            for _ in range(2):
                answer = await w.http.post(f"/v1/calls/{call}/cancel")
                assert (answer.status_code, answer.json()["state"]) == (202, "CANCELLED")
                await reaches(w.http, call, "CANCELLED")
        elif how == "its time is over":
            assert (await reaches(w.http, call, "FAILED"))["error"]["code"] == "deadline_exceeded"
        if how != "its gateway stops":
            await until(lambda: w.gateway.calls.get(call) is None, what="nothing of it is left here")
    if how == "its gateway stops":
        assert "call.cancelled" not in gone
        async with world(nats) as w:
            assert (await reaches(w.http, call, "FAILED"))["error"]["code"] == "instance_lost"


@pytest.mark.parametrize("retries", [0, 1])
async def test_an_answer_that_is_all_here_is_stored_though_its_gateway_stops(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """It was not stopped: else it would be lost, or made a second time."""
    write, writes, may_go_on = Journal.write, asyncio.Event(), asyncio.Event()
    ran: list[str] = []

    async def late(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, Batch):
            writes.set()
            await may_go_on.wait()
        return await write(self, stream, call, entry, *more, **by)

    async def says(run: Run) -> None:
        ran.append(run.head.call)
        run.out(1)
        run.end()

    monkeypatch.setattr(Journal, "write", late)
    async with world(nats) as w:
        await w.deploy(manifest("says", retries=retries), entry(), script=says)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        await writes.wait()
        await until(lambda: (found := w.gateway.calls.get(call)) is not None and found.over, what="all of it is here")
        w.gateway.calls.stop()
        may_go_on.set()
    async with world(nats, {"says": says}) as w:
        await reaches(w.http, call, "SUCCEEDED")
        assert ran == [call]


# --- a journal that lets go of a call -------------------------------------------------------------
async def test_a_call_whose_order_was_evicted_ends_and_its_readers_are_told(nats: Nats) -> None:
    """Others have filled the journal since."""
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        await limit(w.controller.bus, JOURNAL_STREAM, 32 * KIB)
        first = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("k")))
        await until(lambda: gate.runs, what="it runs")
        call = gate.runs[0].head.call
        reading = asyncio.create_task(events_of(other, call))

        async def taken() -> bool:
            return await held(w.controller.bus, JOURNAL_STREAM) > 0 and (await state_of(other, call))["started"]

        await until(taken, what="its beginning is written")
        writer = await nats.bus(GATEWAY_2)
        for number in range(16):
            await writer.jetstream.publish(call_entry(JOURNAL_STREAM, "call-x", str(number)), b"x" * 4 * KIB)
        gate.opened.set()
        told = await first
        assert (told.status_code, told.json()["error"]["code"]) == (410, "journal_expired")
        assert '"code":"journal_expired"' in await reading
        for path in ("", "/events"):
            late = await other.get(f"/v1/calls/{call}{path}")
            assert (late.status_code, late.json()["error"]["code"]) == (410, "journal_expired")
        again = await w.http.post("/fn/gate", json={}, headers=key("k"))
        assert (again.status_code, again.json()["error"]["code"]) == (410, "journal_expired")
        assert len(gate.runs) == 1


async def test_a_call_whose_order_was_lost_with_the_life_of_its_gateway_ends(nats: Nats) -> None:
    """All servers of a cluster were restarted, which have both in memory. No gateway goes on with it."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        first = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("k")))
        await until(lambda: gate.runs, what="it runs")
        call, lives = gate.runs[0].head.call, w.gateway._succession._lives
        first_life = lives.known

        async def said() -> bool:
            batch = call_entry(JOURNAL_STREAM, call, "batch-0")
            return await Stored(w.controller.bus).last(JOURNAL_STREAM, batch) is not None

        async def another() -> bool:
            await drop(w.controller.bus, LIVES_STREAM, life_beat(first_life))
            lives._beaten -= LIVES_AGE_S
            return lives.known != first_life

        await until(said, what="what it said is written")
        await drop(w.controller.bus, JOURNAL_STREAM, call_entry(JOURNAL_STREAM, call, "order"))
        await until(another, what="its gateway has begun another life")
        told = await first
        assert (told.status_code, told.json()["error"]["code"]) == (410, "journal_expired")
        kept = journal_of(w.controller.bus)

        async def ended() -> bool:
            return (await kept.end_of(JOURNAL_STREAM, call)).ended is not None

        await until(ended, what="its end is written")


async def test_who_reads_a_call_that_nobody_has_any_more_is_told(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gateway is gone too, so nothing will ever be written."""
    monkeypatch.setattr(journal, "READING_S", 0.1)
    async with world(nats) as w:
        known = asked("call-0", "0" * 12)
        await journal_of(await nats.bus(GATEWAY_2)).write(JOURNAL_STREAM, "call-0", known, 60)
        async with w.http.stream("GET", "/v1/calls/call-0/events") as reading:
            assert reading.status_code == 200
            await drop(w.controller.bus, JOURNAL_STREAM, call_entry(JOURNAL_STREAM, "call-0", "order"))
            text = "".join([piece async for piece in reading.aiter_text()])
        assert '"code":"journal_expired"' in text


async def test_a_call_that_was_evicted_after_its_gateway_died_is_not_unknown(nats: Nats) -> None:
    """It may have run; whoever is told that it was not begun calls again."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        asking = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("k")))
        await until(lambda: gate.runs, what="it runs")
        call = gate.runs[0].head.call
        stored = Stored(w.controller.bus)

        async def last(subject: str) -> bool:
            return await stored.last(JOURNAL_STREAM, call_entry(JOURNAL_STREAM, call, subject)) is not None

        await until(lambda: last("batch-0"), what="what it said is written")
        await w.gateway._detached.close()
        asking.cancel()
        await asyncio.wait([asking])
    await drop(w.controller.bus, JOURNAL_STREAM, call_entry(JOURNAL_STREAM, call, "order"))
    async with second(nats) as other:
        for path in ("", "/events"):
            answer = await other.get(f"/v1/calls/{call}{path}")
            assert (answer.status_code, answer.json()["error"]["code"]) == (410, "journal_expired")
        assert (await other.post(f"/v1/calls/{call}/cancel")).status_code == 410
        again = await other.post("/fn/gate", json={}, headers=key("k"))
        assert (again.status_code, again.json()["error"]["code"]) == (410, "journal_expired")


async def test_a_writer_is_told_apart_what_became_of_its_call(nats: Nats) -> None:
    """Another gateway has it, or nobody; where nobody has, its end can still be written, and nothing else."""
    bus, kept = await nats.streams(), journal_of(await nats.bus(GATEWAY))
    first, began = asked("call-1"), Began(at=0.0, numerics="n", epoch=1)
    fence = await kept.write(JOURNAL_STREAM, "call-1", first, 60)
    later = await kept.write(JOURNAL_STREAM, "call-1", asked("call-1", "other"), 60)
    with pytest.raises(CallMoved):
        await kept.write(JOURNAL_STREAM, "call-1", began, 60, fence)
    with pytest.raises(CallMoved):
        await kept.write(JOURNAL_STREAM, "call-1", began, 60, 0)
    await drop(bus, JOURNAL_STREAM, call_entry(JOURNAL_STREAM, "call-1", "order"))
    with pytest.raises(JournalExpired):
        await kept.write(JOURNAL_STREAM, "call-1", began, 60, later)
    await kept.write(JOURNAL_STREAM, "call-1", Ended(at=0.0, state=CallState.FAILED), 60, 0)
    with pytest.raises(JournalExpired):
        await kept.find("call-1")


# --- keys -----------------------------------------------------------------------------------------
async def test_a_key_that_lapsed_is_held_again_unless_another_call_has_it(nats: Nats) -> None:
    bus, kept = await nats.streams(), journal_of(await nats.bus(GATEWAY))
    mine, other = KeyClaim(call="call-1", body=b"b"), KeyClaim(call="call-2", body=b"b")
    assert await kept.claim("k", mine) == mine
    await kept.hold("k", mine, 60)
    assert await kept.claim("k", other) == mine
    await drop(bus, KEYS_STREAM, subjects.key_claim("k"))
    await kept.hold("k", mine, 60)
    assert await kept.claim("k", other) == mine
    await drop(bus, KEYS_STREAM, subjects.key_claim("k"))
    assert await kept.claim("k", other) == other
    with pytest.raises(Conflict, match="another call"):
        await kept.hold("k", mine, 60)
    assert await kept.claim("k", mine) == other


@pytest.mark.parametrize("lost", [False, True])
async def test_a_key_is_held_while_its_body_is_written(nats: Nats, lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that takes; one that lapsed all the same, and was claimed by another, begins nothing."""
    monkeypatch.setattr(detached, "CLAIMED_S", 0.0)  # renewed with every part
    hold, write, holds = Journal.hold, Journal.write, list[str]()

    async def holding(self: Journal, name: str, claim: KeyClaim, keep_s: float) -> None:
        holds.append(claim.call)
        await hold(self, name, claim, max(keep_s, 60.0))

    async def writing(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, BodyPart) and entry.number == 1 and lost:
            found = await w.controller.bus.jetstream.get_last_msg(KEYS_STREAM, subjects.KEY_CLAIMS)
            await drop(w.controller.bus, KEYS_STREAM, found.subject or "")
            await self.claim((found.subject or "").rpartition(".")[2], KeyClaim(call="call-2", body=b""))
        return await write(self, stream, call, entry, *more, **by)

    monkeypatch.setattr(Journal, "hold", holding)
    monkeypatch.setattr(Journal, "write", writing)
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        answer = await w.http.post("/fn/count", json={"n": 1, **body(2 * MAX_PART)}, headers=key("k"))
        if lost:
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
            assert not w.node.runs
        else:
            assert answer.json() == [0]
            assert len(holds) >= 3


async def test_a_call_that_is_taken_up_holds_its_key_for_as_long_as_it_may_run_now(nats: Nats) -> None:
    """What the claim had from its first life is over."""

    async def stands(run: Run) -> None:
        await run.cancelled.wait()
        run.end()

    async def lapse(bus: Bus) -> None:
        await drop(bus, KEYS_STREAM, subjects.KEY_CLAIMS)

    ask: dict[str, Any] = {"json": {"n": 3}, "headers": ASYNC | key("k")}
    async with world(nats) as w:
        await w.deploy(manifest("count", retries=1), entry(), script=stands)
        call = (await w.http.post("/fn/count", **ask)).json()["id"]
        await reaches(w.http, call, "RUNNING")
    bus = await nats.bus(CONTROLLER)
    await lapse(bus)
    gate = Gate()
    async with world(nats, {"count": gate}) as next_life:
        await until(lambda: gate.runs, what="it goes on")
        again = await next_life.http.post("/fn/count", **ask)
        assert again.json()["id"] == call
        gate.opened.set()
        await reaches(next_life.http, call, "SUCCEEDED")
        assert await events_of(next_life.http, call) == written(0, 1)


async def test_a_call_that_is_taken_up_ends_where_its_key_is_another_calls(nats: Nats) -> None:
    """Which may have run to its end by now: this one would be the second."""
    gate = Gate()
    async with world(nats) as w:
        await w.deploy(manifest("gate", retries=1), entry(), script=gate)
        kept = journal_of(await nats.bus(GATEWAY_2))
        await kept.claim("k", KeyClaim(call="call-2", body=b""))
        known: CallOrder = asked("call-1", "0" * 12, function="gate", parts=0, key="k", durable=True)
        await kept.write(CALLS_STREAM, "call-1", known, 60)
        w.gateway._taking_up.look(["call-1"])
        assert (await reaches(w.http, "call-1", "FAILED"))["error"]["code"] == "conflict"
        assert not gate.runs, "no instance has heard of it"
        assert await kept.claim("k", KeyClaim(call="call-3", body=b"")) == KeyClaim(call="call-2", body=b"")


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_key_that_lapsed_before_its_order_was_stored_runs_nothing(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    """It is another call's by then."""
    begin, waits, may_go_on = Journal.begin, asyncio.Event(), asyncio.Event()

    async def late(self: Journal, stream: str, mine: CallOrder, keep_s: float) -> int:
        if not waits.is_set():
            waits.set()
            await may_go_on.wait()
        return await begin(self, stream, mine, keep_s)

    monkeypatch.setattr(Journal, "begin", late)
    ran: list[str] = []

    async def work(run: Run) -> None:
        ran.append(run.head.call)
        run.out(1)
        run.end()

    async with world(nats, {"work": work}) as w, second(nats, {"work": work}) as other:
        await w.deploy(manifest("work", streams=False, retries=retries), entry(), script=work)
        first = asyncio.create_task(w.http.post("/fn/work", json={}, headers=key("k")))
        await waits.wait()
        await drop(w.controller.bus, KEYS_STREAM, subjects.KEY_CLAIMS)
        assert (await other.post("/fn/work", json={}, headers=key("k"))).text == "1"
        may_go_on.set()
        answer = await first
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
        assert len(ran) == 1
        assert (await w.http.post("/fn/work", json={}, headers=key("k"))).text == "1"
        assert len(ran) == 1


async def test_a_key_that_stands_is_answered_while_there_is_no_room_for_another(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)

        async def ask(name: str, n: int = 2) -> tuple[int, Any]:
            answer = await w.http.post("/fn/count", json={"n": n}, headers=key(name))
            return answer.status_code, answer.json()

        async def full() -> bool:
            answered, told = await ask("new")
            return answered == 503 and told["error"]["code"] == "store_full"

        assert await ask("stands") == (200, [0, 1])
        await limit(w.controller.bus, KEYS_STREAM, 32 * KIB)
        kept = journal_of(await nats.bus(GATEWAY_2))
        with contextlib.suppress(StoreFull):
            for number in range(100):
                await kept.claim(f"other-{number}", KeyClaim(call="c" * 2000, body=b""))
        await until(full, what="the stream is seen to be full")
        assert await ask("stands") == (200, [0, 1])
        answered, told = await ask("stands", 3)
        assert (answered, told["error"]["code"]) == (422, "invalid_argument")
