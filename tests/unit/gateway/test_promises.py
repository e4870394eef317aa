"""What a gateway has promised holds though JetStream is away, a gateway stops, or another one takes its time."""

import asyncio
from typing import Any

import pytest

from sllm_gateway import detached, journal
from sllm_gateway.journal import Journal
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.calls import Began, BodyPart, CallOrder, Entry
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.frames import FrameKind, Ids
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.subjects import BODIES_STREAM, CALLS_STREAM
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, manifest, second, world
from tests.unit.gateway.test_kept_calls import ASYNC, Gate, count, events_of, key, reaches, state_of, written


async def test_that_a_call_has_ended_is_known_for_as_long_as_what_was_asked(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it seems to run again, an hour after it has ended; the next gateway that starts ends it once more, as one
    that has failed, and has its key stand for that."""
    for module in (detached, journal):  # an answer is kept for a second, and what is known of it for another one
        monkeypatch.setattr(module, "JOURNAL_TTL_S", 1.0)
        monkeypatch.setattr(module, "KNOWN_S", 1.0, raising=False)
    both = ASYNC | key("k")
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        call = (await w.http.post("/fn/count", json={"n": 2}, headers=both)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        await asyncio.sleep(4.0)
        assert (await state_of(w.http, call))["state"] == "SUCCEEDED"
    async with world(nats, {"count": count}) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        await asyncio.sleep(1.0)
        assert (await state_of(w.http, call))["state"] == "SUCCEEDED"
        again = await w.http.post("/fn/count", json={"n": 2}, headers=both)
        assert again.status_code == 202, again.text
        assert again.json()["id"] != call


async def test_a_call_that_is_stored_is_accepted_though_nothing_can_be_read_back(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream goes away between its acknowledgement and the 202: told to call again its caller would have it run
    twice, and know neither."""
    begin, find, away = Journal.begin, Journal.find, False

    async def begun(self: Journal, *asked: Any) -> int:
        nonlocal away
        sequence = await begin(self, *asked)
        away = True
        return sequence

    async def found(self: Journal, *asked: Any, **how: Any) -> Any:
        if away:
            raise Unavailable("no leader")
        return await find(self, *asked, **how)

    monkeypatch.setattr(Journal, "begin", begun)
    monkeypatch.setattr(Journal, "find", found)
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        accepted = await w.http.post("/fn/count", json={"n": 2}, headers=ASYNC)
        assert accepted.status_code == 202, accepted.text
        away = False
        assert await events_of(w.http, accepted.json()["id"]) == written(0, 1)
        assert len(w.node.runs) == 1


async def test_a_gateway_that_drains_takes_no_call_from_those_that_could_run_it(nats: Nats) -> None:
    """It would have it, and not run it, for as long as its own last calls take."""
    async with world(nats) as w:
        gate, journal = Gate(), w.gateway._detached._journal
        await w.deploy(manifest("gate"), entry(), script=gate)
        await w.deploy(manifest("count"), entry(), script=count)
        last = asyncio.create_task(w.http.post("/fn/gate", json={}))
        await until(lambda: gate.runs, what="it has one call left")
        draining = asyncio.create_task(w.gateway.calls.drain(60.0))
        await until(lambda: w.gateway.calls.draining)
        order = CallOrder(
            call="call-left", function="count", version=1, kind="fn", seed=1, parts=1, gateway="gone", life="d" * 12,
            durable=True, created=1.0,
        )  # fmt: skip
        await journal.write(BODIES_STREAM, order.call, BodyPart(0, b'{"n": 2}'), 600.0, number=0)
        await journal.begin(CALLS_STREAM, order, 600.0)
        taking_up = w.gateway._taking_up
        taking_up.look(())  # the life of its gateway is over
        await until(lambda: not taking_up._due.is_set())
        await asyncio.sleep(0.5)
        async with second(nats, {"count": count}) as other:
            assert (await reaches(other, order.call, "SUCCEEDED"))["result"] == [0, 1]
            assert not draining.done()
        gate.opened.set()
        await last
        await draining


async def test_a_kept_call_that_its_gateway_leaves_to_others_has_not_failed(nats: Nats) -> None:
    """Until another one has it, it can be cancelled; and nobody is told that it failed."""
    async with world(nats) as w, second(nats, {"gate": Gate()}) as other:
        await w.deploy(manifest("gate", engine=True, resumable=True, model="file:///m"), entry(), script=Gate())
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await reaches(other, call, "RUNNING")
        w.gateway.calls.stop()  # what follows is the rest of ``Gateway.drain``, step by step
        await w.gateway._detached.finish(1.0)
        await until(lambda: w.gateway.calls.get(call) is None, what="its node has ended it")
        cancelling = asyncio.create_task(other.post(f"/v1/calls/{call}/cancel"))
        await asyncio.wait({cancelling}, timeout=1.5)
        await w.gateway._taking_up.close()
        await w.gateway._succession.close()
        assert (await cancelling).json() == {"id": call, "state": "CANCELLED"}
        await reaches(other, call, "CANCELLED")
        told = (await other.get(f"{API}/events", params={"kind": "call.failed", "call": call})).text
        assert "call.failed" not in told


async def test_who_had_a_call_is_written_also_where_its_answer_was_here_before_that(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream was away for longer than its patience while a short call ran."""
    write, refused = Journal.write, list[str]()

    async def away(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, Began) and not refused:
            refused.append(call)
            await until(lambda: (found := w.gateway.calls.get(call)) is not None and found.over)
            raise Unavailable("no leader")
        return await write(self, stream, call, entry, *more, **by)

    async def says(run: Run) -> None:
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (5,))))
        run.out(0)
        run.end()

    monkeypatch.setattr(Journal, "write", away)
    async with world(nats) as w:
        told = manifest("says", engine=True, resumable=True, model="file:///m")
        await w.deploy(told, entry("i1", fingerprint="A", exact=False), script=says)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        found = await reaches(w.http, call, "SUCCEEDED")
        answer = await w.http.get(f"/v1/calls/{call}")
        assert refused == [call]
        assert found["started"] is not None
        assert answer.headers.get("sllm-exact") == "false"


async def test_a_call_that_is_read_goes_on_whatever_the_window(nats: Nats) -> None:
    async with world(nats, resume_window=0.5) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        asking = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("read")))
        await until(lambda: gate.runs, what="it runs")
        await asyncio.sleep(2.0)
        gate.opened.set()
        answer = await asking
        assert (answer.status_code, answer.json()) == (200, [0, 1])


async def test_nobody_is_asked_to_take_a_call_that_ended_while_nats_was_away(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller has gone, or was told how it ended; its function would run all the same."""
    async with world(nats) as w:
        await w.deploy(manifest("count", streams=False), entry(), script=count)
        bus, there = w.gateway._bus, False
        up = Bus.connected.fget  # type: ignore[attr-defined]
        monkeypatch.setattr(Bus, "connected", property(lambda self: (self is not bus or there) and up(self)))
        asking = asyncio.create_task(w.http.post("/fn/count", json={"n": 1}))
        await until(lambda: any(call.binding is not None for call in w.gateway.calls.open()), what="it has its place")
        call = w.gateway.calls.open()[0]
        asking.cancel()
        await until(lambda: call.over, what="its caller has gone")
        there = True
        await asyncio.sleep(2.0)
        assert not w.node.opened
        await until(lambda: w.gateway.calls.get(call.id) is None, what="its place is given back")
