"""Calls that go on without their caller, and are read again: a real HTTP client, a scripted node, real NATS."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.js.api import RawStreamMsg

from sllm_gateway import keeping, taking_up, views
from sllm_gateway.asgi import PIECE
from sllm_gateway.call import Gathered
from sllm_gateway.calls import Calls
from sllm_gateway.detached import Detached, whole
from sllm_gateway.journal import CLAIMED_S, Journal
from sllm_gateway.link import Link
from sllm_gateway.replay import After, stream_of
from sllm_gateway.resumption import VALUES
from sllm_gateway.stored import Stored
from sllm_gateway.timers import TICK_S
from sllm_runtime.protocol import codec, limits, subjects
from sllm_runtime.protocol.calls import Batch, Began, CallOrder, Entry, Kept, KeyClaim, Reading, entry_name
from sllm_runtime.protocol.errors import CallMoved, Cancelled, Draining, InstanceLost, Unavailable
from sllm_runtime.protocol.frames import Frame, FrameKind, Ids, Opened, Usage
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.limits import BATCH_BYTES, MAX_PART
from sllm_runtime.protocol.lives import LIVES_AGE_S
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.subjects import LIVES_STREAM, life_beat
from tests.fixtures.nats import GATEWAY, GATEWAY_2, Nats
from tests.fixtures.nats import stored as in_stream
from tests.fixtures.waiting import GIVE_UP_S, until
from tests.unit.gateway.peer import Run, World, entry, manifest, second, starting, world
from tests.unit.gateway.test_api import events
from tests.unit.gateway.test_succession import asked

SSE = {"accept": "text/event-stream"}
ASYNC = {"prefer": "respond-async"}


def key(name: str) -> dict[str, str]:
    return {"idempotency-key": name}


async def count(run: Run) -> None:
    for number in range(run.arguments["n"]):
        run.out(number)
    run.end(usage=Usage(prompt=1, completion=2))


class Gate:
    """A function that yields 0, and the rest when it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()
        self.runs: list[Run] = []

    async def __call__(self, run: Run) -> None:
        self.runs.append(run)
        run.out(0)
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.opened, run.cancelled)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waiting:
                each.cancel()
        if not run.cancelled.is_set():
            run.out(1)
        run.end()


async def state_of(http: httpx.AsyncClient, call: str) -> dict[str, Any]:
    answer = await http.get(f"/v1/calls/{call}")
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def reaches(http: httpx.AsyncClient, call: str, state: str) -> dict[str, Any]:
    async def there() -> bool:
        return bool((await state_of(http, call))["state"] == state)

    await until(there, what=f"{call} is {state}")
    return await state_of(http, call)


async def stored(w: World, call: str, name: str) -> RawStreamMsg:
    """What the journal has under that name."""
    subject = subjects.call_entry(subjects.CALLS_STREAM, call, name)
    return await w.controller.bus.jetstream.get_last_msg(subjects.CALLS_STREAM, subject)


async def events_of(http: httpx.AsyncClient, call: str, after: int | None = None) -> str:
    headers = {} if after is None else {"last-event-id": str(after)}
    answer = await http.get(f"/v1/calls/{call}/events", headers=headers)
    assert answer.status_code == 200, answer.text
    return "".join(line + "\n" for line in answer.text.splitlines() if not line.startswith(":"))


def written(*values: int, first: int = 0) -> str:
    return "".join(f"id: {n}\ndata: {value}\n\n" for n, value in enumerate(values, first)) + "data: [DONE]\n\n"


async def test_an_answer_can_be_read_for_five_minutes(nats: Nats) -> None:
    """From its end on: by the entry that says so, which everything else of it outlives."""
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        call = (await w.http.post("/fn/count", json={"n": 1}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        seconds = {name: int(((await stored(w, call, name)).headers or {})["Nats-TTL"]) for name in ("kept", "batch-0")}
        assert seconds["kept"] == 300
        assert seconds["batch-0"] >= 300 + manifest("count").timeout


@pytest.mark.parametrize("retries", [0, 1])
async def test_a_call_that_runs_is_of_its_gateways_next_life(nats: Nats, retries: int) -> None:
    """JetStream was away for so long that the record of this one has aged. Others would take the call for one of a life
    that is over."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate", retries=retries), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "RUNNING")
        lives, jetstream = w.gateway._succession._lives, w.controller.bus.jetstream
        first = lives.known

        async def another() -> bool:
            await jetstream.purge_stream(LIVES_STREAM, subject=life_beat(first))
            lives._beaten -= LIVES_AGE_S
            return lives.known != first

        async def renewed() -> bool:
            stored = await w.gateway._detached._journal.find(call)
            return stored[1].life == lives.known

        await until(another, what="it has begun another life")
        await until(renewed, what="the call is of that one")
        order = (await stored(w, call, "order")).seq or 0

        async def begun_again() -> bool:
            return ((await stored(w, call, "began")).seq or 0) > order

        await until(begun_again, what="that it has begun stands for as long as its order")
        gate.opened.set()
        assert (await reaches(w.http, call, "SUCCEEDED"))["error"] is None


async def test_respond_async_is_accepted_and_its_answer_read_at_any_gateway(nats: Nats) -> None:
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        accepted = await w.http.post("/fn/gate", json={}, headers=ASYNC)
        assert accepted.status_code == 202
        call = accepted.json()["id"]
        assert accepted.headers["location"] == f"/v1/calls/{call}"
        assert accepted.headers["sllm-call-id"] == call
        await reaches(other, call, "RUNNING")
        reading = asyncio.create_task(events_of(other, call))
        late = asyncio.create_task(events_of(w.http, call, after=0))
        gate.opened.set()
        assert await reading == written(0, 1)
        assert await late == written(1, first=1)
        done = await reaches(other, call, "SUCCEEDED")
        assert done["result"] == [0, 1]
        assert done["function"] == "gate"
        assert done["created"] <= done["started"] <= done["finished"]
        assert await events_of(other, call, after=1) == written()
        assert await events_of(other, call, after=999) == written()
        listed = (await other.get("/v1/calls", params={"function": "gate", "state": "SUCCEEDED"})).json()["calls"]
        assert [each["id"] for each in listed] == [call]
        assert (await other.get("/v1/calls", params={"function": "other"})).json()["calls"] == []
        assert len(gate.runs) == 1


async def test_a_key_is_one_execution(nats: Nats) -> None:
    """Joined while it runs, replayed afterwards, with and without a stream, at any gateway; another body is 422."""
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        await until(lambda: w.gateway.table.get("gate", 1))
        first = asyncio.create_task(w.http.post("/fn/gate", json={"a": 1}, headers=key("k") | SSE))
        await until(lambda: gate.runs, what="it runs")
        joined = asyncio.create_task(other.post("/fn/gate", json={"a": 1}, headers=key("k")))
        wrong = await other.post("/fn/gate", json={"a": 2}, headers=key("k"))
        assert (wrong.status_code, wrong.json()["error"]["field"]) == (422, "Idempotency-Key")
        gate.opened.set()
        answers = [await first, await joined, await w.http.post("/fn/gate", json={"a": 1}, headers=key("k") | SSE)]
        assert [answer.status_code for answer in answers] == [200, 200, 200]
        assert all(answers[number].text.endswith(written(0, 1)) for number in (0, 2))
        assert answers[1].json() == [0, 1]
        assert len({answer.headers["sllm-call-id"] for answer in answers}) == 1
        assert len(gate.runs) == 1
        await w.http.post("/fn/gate", json={"a": 1}, headers=key("another"))
        assert len(gate.runs) == 2


async def test_a_key_is_one_of_its_route(nats: Nats) -> None:
    """The same one at another function is another call."""
    async with world(nats) as w:
        for name in ("count", "other"):
            await w.deploy(manifest(name), entry(), script=count)
        answers = [await w.http.post(f"/fn/{name}", json={"n": 1}, headers=key("k")) for name in ("count", "other")]
        assert [answer.json() for answer in answers] == [[0], [0]]
        assert answers[0].headers["sllm-call-id"] != answers[1].headers["sllm-call-id"]
        assert len(w.node.runs) == 2


async def test_what_was_begun_and_is_known_no_more_is_not_to_be_called_again(nats: Nats) -> None:
    """Its key stands longer than its journal: with a new call the same key would run twice."""
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        ask: dict[str, Any] = {"json": {"n": 1}, "headers": key("k")}
        call = (await w.http.post("/fn/count", **ask)).headers["sllm-call-id"]
        for stream in (subjects.JOURNAL_STREAM, subjects.CALLS_STREAM):
            await w.controller.bus.jetstream.purge_stream(stream)
        again = await w.http.post("/fn/count", **ask)
        assert (again.status_code, again.json()["error"]["code"]) == (410, "journal_expired")
        assert call in again.json()["error"]["message"]
        assert again.headers["sllm-call-id"] == call
        assert len(w.node.runs) == 1


async def test_a_call_is_kept_as_its_first_request_asked(nats: Nats) -> None:
    """A 202 for a call that ends without a reader would promise too much; one that does not is read like any other."""
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        await until(lambda: w.gateway.table.get("gate", 1))
        first = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("k")))
        await until(lambda: gate.runs, what="it runs")
        refused = await w.http.post("/fn/gate", json={}, headers=key("k") | ASYNC)
        assert (refused.status_code, refused.json()["error"]["field"]) == (422, "Idempotency-Key")
        assert "preference-applied" not in refused.headers
        durable = await w.http.post("/fn/gate", json={}, headers=key("durable") | ASYNC)
        await reaches(other, durable.json()["id"], "RUNNING")
        again = await w.http.post("/fn/gate", json={}, headers=key("durable") | ASYNC)
        assert (again.status_code, again.json()) == (202, {"id": durable.json()["id"], "state": "RUNNING"})
        gate.opened.set()
        assert (await first).json() == [0, 1]
        assert (await w.http.post("/fn/gate", json={}, headers=key("durable"))).json() == [0, 1]
        assert len(gate.runs) == 2


async def test_an_answer_is_replayed_as_the_version_gave_it_that_ran(nats: Nats) -> None:
    """Not as the one that is active by now would: this one is no generator."""
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        ask: dict[str, Any] = {"json": {"n": 1}, "headers": key("k")}
        assert (await w.http.post("/fn/count", **ask)).json() == [0]
        await w.deploy(manifest("count"), entry(), active=False)
        await w.deploy(manifest("count", streams=False), entry("i2", version=2), version=2)
        assert (await w.http.post("/fn/count", **ask)).json() == [0]
        assert (await w.http.post("/fn/count", json={"n": 1}, headers=key("another"))).json() == 0
        assert len(w.node.runs) == 2


OTHER = {"type": "object", "properties": {"m": {}}, "required": ["m"], "additionalProperties": False}
"""Arguments of a function that takes none of ``count`` and ``Gate``."""


async def replaced(w: World, name: str) -> None:
    """A version with other arguments is the active one now."""
    await w.deploy(manifest(name), entry(), active=False)
    await w.deploy(manifest(name, input_schema=OTHER), entry("i2", version=2), version=2)


async def deleted(w: World, name: str) -> None:
    await w.controller.unroute(name)
    await until(lambda: w.gateway.table.get(name, 1) is None, what="it is gone")


@pytest.mark.parametrize(("gone", "code"), [(replaced, "invalid_argument"), (deleted, "function_not_found")])
async def test_an_answer_is_replayed_whatever_its_function_is_by_now(nats: Nats, gone: Any, code: str) -> None:
    """Its arguments were right when it was called. A new call's are checked, and another request is told of its key."""
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        ask: dict[str, Any] = {"json": {"n": 2}, "headers": key("k")}
        first = await w.http.post("/fn/count", **ask)
        assert first.json() == [0, 1]
        await gone(w, "count")
        again = await w.http.post("/fn/count", **ask)
        assert (again.status_code, again.json()) == (200, [0, 1])
        assert again.headers["sllm-call-id"] == first.headers["sllm-call-id"]
        assert (await w.http.post("/fn/count", json={"n": 2}, headers=key("k") | SSE)).text.endswith(written(0, 1))
        for wrong in (b'{"m": 2}', b"{"):
            refused = await w.http.post("/fn/count", content=wrong, headers=key("k"))
            assert (refused.status_code, refused.json()["error"]["field"]) == (422, "Idempotency-Key")
        for new in (key("another"), {}):
            refused = await w.http.post("/fn/count", json={"n": 2}, headers=new)
            assert refused.json()["error"]["code"] == code
        assert len(w.node.runs) == 1


async def test_a_call_that_runs_is_joined_whatever_its_function_is_by_now(nats: Nats) -> None:
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        both = key("k") | ASYNC
        accepted = await w.http.post("/fn/gate", json={}, headers=both)
        await reaches(w.http, accepted.json()["id"], "RUNNING")
        await replaced(w, "gate")
        again = await w.http.post("/fn/gate", json={}, headers=both)
        assert (again.status_code, again.json()) == (202, {"id": accepted.json()["id"], "state": "RUNNING"})
        joined = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("k")))
        gate.opened.set()
        assert (await joined).json() == [0, 1]
        assert len(gate.runs) == 1


async def test_no_arguments_are_the_same_ones_however_they_are_written(nats: Nats) -> None:
    async with world(nats) as w:
        gate = Gate()
        gate.opened.set()
        await w.deploy(manifest("gate"), entry(), script=gate)
        for body in (b"", b" \n", b"{}"):
            answer = await w.http.post("/fn/gate", content=body, headers=key("k"))
            assert (answer.status_code, answer.json()) == (200, [0, 1])
        assert len(gate.runs) == 1


async def test_a_call_that_is_being_written_is_waited_for_whatever_its_function_is_by_now(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JetStream takes its time. One that was refused then leaves its key, to what the function is now."""
    claimed, go_on, submit = asyncio.Event(), asyncio.Event(), Detached.submit

    async def late(self: Detached, *asked: Any) -> None:
        claimed.set()
        await go_on.wait()
        if refuse:
            raise Unavailable("not now")
        await submit(self, *asked)

    monkeypatch.setattr(Detached, "submit", late)
    async with world(nats) as w:
        for refuse, name in enumerate(("written", "refused")):
            claimed.clear()
            go_on.clear()
            await w.deploy(manifest(name), entry(), script=count)
            ask: dict[str, Any] = {"json": {"n": 2}, "headers": key("k")}
            first = asyncio.create_task(w.http.post(f"/fn/{name}", **ask))
            await claimed.wait()
            await replaced(w, name)
            joined = asyncio.create_task(w.http.post(f"/fn/{name}", **ask))
            await asyncio.wait({joined}, timeout=0.3)
            go_on.set()
            answers = [await first, await joined]
            assert [answer.status_code for answer in answers] == ([503, 422] if refuse else [200, 200])
            ids = {answer.headers["sllm-call-id"] for answer in answers}
            assert len(ids) == (2 if refuse else 1), "what is refused is named by its own id"
        assert len(w.node.runs) == 1


async def test_a_replay_needs_the_token_of_a_call(nats: Nats, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret\n")
    token = {"authorization": "Bearer secret"}
    async with world(nats, token_file=tmp_path / "token") as w:
        await w.deploy(manifest("count"), entry(), script=count)
        for headers, status in ((token, 200), ({}, 401), ({"authorization": "Bearer another"}, 401), (token, 200)):
            answer = await w.http.post("/fn/count", json={"n": 2}, headers=key("k") | headers)
            assert (answer.status_code, "[0,1]" in answer.text) == (status, status == 200)
        assert len(w.node.runs) == 1


async def test_many_with_one_key_at_once(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        same = [w.http.post("/fn/count", json={"n": 3}, headers=key("same")) for _ in range(10)]
        answers = await asyncio.gather(*same)
        assert [answer.json() for answer in answers] == [[0, 1, 2]] * 10
        assert len(w.node.runs) == 1


@pytest.mark.parametrize("wrong", ["", "x" * 256, "tab\there"])
async def test_a_key_that_is_none_is_refused(nats: Nats, wrong: str) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        answer = await w.http.post("/fn/count", json={"n": 1}, headers=[("idempotency-key", wrong)])
        assert answer.status_code == 400
        assert not w.node.runs


async def test_what_cannot_be_read(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        for path in ("", "/events"):
            unknown = await w.http.get(f"/v1/calls/call-nobody{path}")
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "call_not_found")
        assert (await w.http.post("/v1/calls/call-nobody/cancel")).status_code == 404
        call = (await w.http.post("/fn/count", json={"n": 1}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        for last in ("x", "-1", "1.5", "9" * 30):
            answer = await w.http.get(f"/v1/calls/{call}/events", headers={"last-event-id": last})
            assert answer.status_code == 400
        # Its time is over: what says so has gone from the stream.
        purged = subjects.call_entry(subjects.CALLS_STREAM, call, "kept")
        await w.controller.bus.jetstream.purge_stream(subjects.CALLS_STREAM, subject=purged)
        expired = await w.http.get(f"/v1/calls/{call}/events")
        assert (expired.status_code, expired.json()["error"]["code"]) == (410, "journal_expired")
        assert (await state_of(w.http, call))["result"] is None


@pytest.mark.parametrize("gone", [["batch-0"], ["batch-0", "batch-1"]])
async def test_an_answer_that_lost_its_beginning_or_all_of_it_does_not_seem_whole(nats: Nats, gone: list[str]) -> None:
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=[*ASYNC.items(), *key("k").items()])).json()["id"]
        async with w.http.stream("GET", f"/v1/calls/{call}/events") as reading:
            async for line in reading.aiter_lines():
                if line == "id: 0":  # it is a batch of its own
                    break
        gate.opened.set()
        await reaches(w.http, call, "SUCCEEDED")
        for name in gone:
            purged = subjects.call_entry(subjects.CALLS_STREAM, call, name)
            await w.controller.bus.jetstream.purge_stream(subjects.CALLS_STREAM, subject=purged)
        told = await events_of(w.http, call)
        assert '"code":"journal_expired"' in told
        assert "id: " not in told
        again = await w.http.post("/fn/gate", json={}, headers=key("k"))
        assert (again.status_code, again.json()["error"]["code"]) == (410, "journal_expired")
        assert (await state_of(w.http, call))["result"] is None


async def test_one_whose_instance_takes_no_more_ends_though_its_gateway_lives(nats: Nats) -> None:
    """Its instance's word is that where a gateway stops, whose next life goes on with it; of a call that has begun it
    is not told, since an SDK would take it for one that no function has seen."""

    async def leaves(run: Run) -> None:
        run.out(0)
        run.end(Draining("this instance is stopping"))

    async with world(nats) as w:
        await w.deploy(manifest("leaves"), entry(), script=leaves)
        call = (await w.http.post("/fn/leaves", json={}, headers=ASYNC)).json()["id"]
        assert (await reaches(w.http, call, "FAILED"))["error"]["code"] == "instance_lost"


async def test_what_came_of_an_instance_is_known_to_be_its_own(nats: Nats) -> None:
    """It dies with its first frames, before anything is written, and the gateway stops while another one is awaited:
    the next life goes on where the numerics are the same."""
    told = manifest("count", engine=True, resumable=True, model="file:///m")

    async def dies(run: Run) -> None:
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (5,))))
        run.out(0)
        run.end(InstanceLost("the worker was killed"))

    async def goes_on(run: Run) -> None:
        for number in range(run.head.delivered, 3):
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (5 + number,))))
            run.out(number)
        run.end()

    async with world(nats) as w:
        w.node.judge = lambda _: Opened(status="busy" if w.node.runs else "accepted")
        await w.deploy(told, entry("i1", fingerprint="A"), script=dies)
        call = (await w.http.post("/fn/count", json={}, headers=ASYNC)).json()["id"]
        batch = subjects.call_entry(subjects.CALLS_STREAM, call, entry_name(Batch, 0))
        await in_stream(w.controller.bus, subjects.CALLS_STREAM, batch, 1)
    async with world(nats, {"count": goes_on}) as w:
        await w.deploy(told, entry("i2", fingerprint="A"), script=goes_on)
        assert await events_of(w.http, call) == written(0, 1, 2)


async def test_who_repeats_a_key_or_cancels_reads_no_answer(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """To say how a call stands no more of it is read than that, however large its answer is."""
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        headers = ASYNC | key("k")
        call = (await w.http.post("/fn/count", json={"n": 3}, headers=headers)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        w.gateway._recent._ended.clear()  # as at another gateway

        def refused(*_: Any) -> None:
            raise AssertionError("all of it is read")

        monkeypatch.setattr(Journal, "entries", refused)
        again = await w.http.post("/fn/count", json={"n": 3}, headers=headers)
        assert (again.status_code, again.json()) == (202, {"id": call, "state": "SUCCEEDED"})
        cancelled = await w.http.post(f"/v1/calls/{call}/cancel")
        assert (cancelled.status_code, cancelled.json()["state"]) == (202, "SUCCEEDED")


async def test_cancel_ends_it_and_is_repeatable(nats: Nats) -> None:
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await until(lambda: gate.runs, what="it runs")
        for _ in range(2):
            assert (await other.post(f"/v1/calls/{call}/cancel")).status_code == 202
            await reaches(other, call, "CANCELLED")
        await until(gate.runs[0].cancelled.is_set, what="its instance has heard it")
        assert '"code":"cancelled"' in await events_of(w.http, call)


async def test_calls_that_nobody_keeps_are_listed_and_cancelled_at_any_gateway(nats: Nats) -> None:
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        kept = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await reaches(other, kept, "RUNNING")
        plain = [asyncio.create_task(w.http.post("/fn/gate", json={})) for _ in range(2)]
        await until(lambda: len(gate.runs) == 3, what="they run")

        async def listed(**wanted: Any) -> Any:
            answer = (await other.get("/v1/calls", params=wanted)).json()
            assert answer["silent"] == []
            return answer

        async def all_three() -> bool:
            return len((await listed())["calls"]) == 3

        await until(all_three, what="the gateways have heard of each other")
        assert "\nsllm_gateways 2.0\n" in (await other.get("/metrics")).text
        found = {each["id"]: each for each in (await listed())["calls"]}
        assert found[kept]["kept"]
        for each in found.values():
            assert (each["state"], each["instance"], each["gateway"]) == ("RUNNING", entry().instance, GATEWAY)
        page: list[str] = []
        after = ""
        for _ in range(3):
            part = await listed(limit=1, after=after, function="gate", state="RUNNING")
            page += [each["id"] for each in part["calls"]]
            after = part["next"]
        assert (sorted(page), after) == (sorted(found), "")
        assert (await listed(state="QUEUED"))["calls"] == (await listed(function="other"))["calls"] == []
        first = next(name for name in found if name != kept)
        assert not (await state_of(other, first))["kept"]
        for name in found:
            assert (await other.post(f"/v1/calls/{name}/cancel")).status_code == 202
        assert {(await each).status_code for each in plain} == {499}
        await reaches(other, kept, "CANCELLED")
        assert [each["id"] for each in (await listed())["calls"]] == [kept], "what nobody keeps is gone at its end"
        assert (await other.get(f"/v1/calls/{first}")).status_code == 404


async def test_a_kept_call_that_waits_again_is_shown_and_found_as_one_that_waits(nats: Nats) -> None:
    """Its instance died: its journal says that it has begun, its gateway that it waits."""

    async def dies(run: Run) -> None:
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (0,))))
        run.out(0)
        await until(lambda: run.outbox.acked >= 2)
        await die.wait()
        run.end(InstanceLost("the worker died"))

    die = asyncio.Event()
    async with world(nats) as w, second(nats) as other:

        async def found(state: str) -> list[tuple[str, str, bool]]:
            answer = (await other.get("/v1/calls", params={"state": state} if state else {})).json()
            return [(each["id"], each["state"], each["kept"]) for each in answer["calls"]]

        async def waits() -> bool:
            return await found("") == [(call, "QUEUED", True)]

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=dies)
        call = (await w.http.post("/fn/tokens", json={}, headers=ASYNC)).json()["id"]
        await reaches(other, call, "RUNNING")
        await w.deploy(engine("tokens"))  # no instance is left
        die.set()
        await until(waits, what="it waits again")
        assert await found("QUEUED") == [(call, "QUEUED", True)]
        assert await found("RUNNING") == []
        assert (await state_of(other, call))["state"] == "QUEUED"
        assert (await other.post(f"/v1/calls/{call}/cancel")).json() == {"id": call, "state": "CANCELLED"}


@pytest.mark.parametrize("kept", [True, False])
async def test_a_call_that_an_instance_is_started_for_is_shown_and_found_as_such(nats: Nats, kept: bool) -> None:
    """HTTP.md: states QUEUED, STARTING, RUNNING ..., whatever gateway is asked."""
    async with world(nats) as w, second(nats) as other:
        await w.deploy(manifest("count"))
        w.node.report(starting("count", Progress(stage="weights", done=1, total=2)))
        body = {"n": 1}
        calling = asyncio.create_task(w.http.post("/fn/count", json=body, headers=ASYNC if kept else SSE))

        async def found(state: str) -> list[tuple[str, bool]]:
            w.node.report(starting("count", Progress(stage="weights", done=1, total=2)))
            answer = (await other.get("/v1/calls", params={"state": state})).json()
            return [(each["state"], each["kept"]) for each in answer["calls"]]

        async def starts() -> bool:
            return await found("STARTING") == [("STARTING", kept)]

        await until(starts, what="it is found among those that start")
        assert await found("QUEUED") == []
        (call,) = (await other.get("/v1/calls")).json()["calls"]
        assert (await state_of(other, call["id"]))["state"] == "STARTING"
        await other.post(f"/v1/calls/{call['id']}/cancel")
        await calling


@pytest.mark.parametrize("how", ["its instance dies", "its gateway is another one"])
async def test_it_started_when_an_instance_first_had_it(nats: Nats, how: str) -> None:
    """Not when it went on elsewhere: what it took would be what its last instance did."""

    async def tokens(run: Run) -> None:
        for number in range(run.head.delivered, 3):
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
            run.out(number)
            if not run.head.delivered:
                await until(lambda: die.is_set() or run.cancelled.is_set())
                run.end(InstanceLost("the worker died"))
                return
        run.end()

    die = asyncio.Event()
    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry("i1", fingerprint="f"), script=tokens)
        call = (await w.http.post("/fn/tokens", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "RUNNING")
        first = (await state_of(w.http, call))["started"]
        assert first is not None
        if how == "its instance dies":
            await w.deploy(engine("tokens"), entry("i1", fingerprint="f"), entry("i2", fingerprint="f"), script=tokens)
            die.set()
            done = await reaches(w.http, call, "SUCCEEDED")
    if how != "its instance dies":
        async with world(nats, {"tokens": tokens}) as w:
            done = await reaches(w.http, call, "SUCCEEDED")
    assert done["result"] == [0, 1, 2]
    assert done["started"] == first


async def test_calls_that_were_taken_up_are_listed_as_of_when_they_were_made(nats: Nats) -> None:
    """Page by page each of them once, also where a state is asked for: its gateway is asked for those before a page."""
    gate = Gate()

    async def says_nothing(run: Run) -> None:
        await run.cancelled.wait()
        run.end()

    async def paged(w: World, **wanted: Any) -> list[str]:
        found, after = list[str](), ""
        while True:
            answer = (await w.http.get("/v1/calls", params={"limit": 2, "after": after, **wanted})).json()
            found += [each["id"] for each in answer["calls"]]
            if not (after := answer["next"]):
                return found

    async with world(nats) as w:
        await w.deploy(manifest("gate", retries=1), entry(), script=says_nothing)
        calls = [(await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"] for _ in range(3)]
    async with world(nats, {"gate": gate}) as next_life:
        for call in calls:
            await reaches(next_life.http, call, "RUNNING")
        await until(lambda: len(gate.runs) == 3, what="they run")
        assert await paged(next_life, state="RUNNING") == await paged(next_life) == calls[::-1]


async def test_a_page_of_very_many_calls_holds_up_no_stream(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        f"{subjects.CALLS_STREAM}.call-{number}": CallOrder(
            call=f"call-{number}", function="f", version=1, kind="fn", seed=1, parts=0, gateway="gone", durable=True,
            created=float(number),
        )
        for number in range(5000)
    }  # fmt: skip
    stored = {subject.replace("sllm_calls", "sllm.calls"): codec.pack(order) for subject, order in made.items()}
    shown, turns, lists = list[str](), list[int](), True

    async def listed(_bus: Any, stream: str, subject: str) -> dict[str, bytes]:
        wanted = stream == subjects.CALLS_STREAM and subject.endswith(entry_name(CallOrder))
        return stored if wanted else {}

    def view(journaled: Any, told: Any = None) -> Any:
        shown.append(journaled.order.call)
        return show(journaled, told)

    async def stream() -> None:
        while lists:
            await asyncio.sleep(0)
            turns[-1] += 1

    show = views.call
    monkeypatch.setattr("sllm_gateway.journal.snapshot", listed)
    monkeypatch.setattr(views, "call", view)
    async with world(nats) as w:
        turns.append(0)
        reading = asyncio.create_task(stream())
        all_ = await w.gateway._kept._journal.all()
        lists = False
        await reading
        answer = (await w.http.get("/v1/calls", params={"limit": 2})).json()
    assert len(all_) == 5000
    assert turns[0] >= 9
    assert [each["id"] for each in answer["calls"]] == ["call-4999", "call-4998"]
    assert len(shown) == 3, "one more than is shown: whether there is more"


async def test_no_function_is_any(nats: Nats) -> None:
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        await w.deploy(manifest("count"), entry(), script=count)
        ended = (await w.http.post("/fn/count", json={"n": 1}, headers=ASYNC)).json()["id"]
        await reaches(w.http, ended, "SUCCEEDED")
        runs = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, runs, "RUNNING")
        for wanted in ({"function": ""}, {}):
            listed = (await w.http.get("/v1/calls", params=wanted)).json()["calls"]
            assert [(each["id"], each["kept"]) for each in listed] == [(runs, True), (ended, True)]


async def test_cancelling_what_has_ended_says_how_it_ended(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        call = (await w.http.post("/fn/count", json={"n": 1}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        answer = await w.http.post(f"/v1/calls/{call}/cancel")
        assert (answer.status_code, answer.json()) == (202, {"id": call, "state": "SUCCEEDED"})


@pytest.mark.parametrize("headers", [ASYNC, {}])
async def test_one_that_has_ended_and_is_still_open_is_not_cancelled(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str]
) -> None:
    """Its journal is not written yet, or its caller has not read all of it."""
    go, journal, leave = asyncio.Event(), Journal.write, Calls.leave
    left: list[Any] = []

    async def waits(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, Kept):
            await go.wait()
        return await journal(self, stream, call, entry, *more, **by)

    def later(self: Calls, call: Any) -> None:
        left.append(call)
        if headers:
            leave(self, call)

    monkeypatch.setattr(Journal, "write", waits)
    monkeypatch.setattr(Calls, "leave", later)
    async with world(nats) as w, second(nats) as other:
        await w.deploy(manifest("count"), entry(), script=count)
        answer = await w.http.post("/fn/count", json={"n": 1}, headers=headers)
        call = answer.headers["sllm-call-id"]
        (found,) = w.gateway.calls._open.values()
        await until(lambda: found.settled, what="it has ended")
        for gateway in (w.http, other):
            answer = await gateway.post(f"/v1/calls/{call}/cancel")
            assert (answer.status_code, answer.json()["state"]) == (202, "SUCCEEDED")
        go.set()
        for each in left:
            leave(w.gateway.calls, each)


async def test_a_gateway_that_does_not_answer_is_named(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sllm_gateway.recent.ASK_S", 0.1)
    async with world(nats) as w:
        monkeypatch.setattr(w.gateway._kept, "_others", lambda: {"of-before"})
        assert (await w.http.get("/v1/calls")).json() == {"calls": [], "next": "", "silent": ["of-before"]}


async def test_a_gateway_that_does_not_hear_of_a_cancel_at_once_is_told_again(nats: Nats) -> None:
    """Its server of NATS was away, and it lives: it reads nothing of what is written for who goes on with its calls."""
    async with world(nats) as w, second(nats) as other:
        gate, routes = Gate(), w.gateway._kept
        await w.deploy(manifest("gate"), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await until(lambda: gate.runs, what="it runs")
        await routes._subscriptions[0].unsubscribe()
        cancelling = asyncio.create_task(other.post(f"/v1/calls/{call}/cancel"))

        async def written() -> bool:
            stream, _ = await routes._journal.find(call)
            return (await routes._journal.now(stream, call))[0].cancelled

        await until(written, what="it is written for who goes on with it")
        routes._subscriptions[0] = await routes._bus.listen(subjects.CANCEL_CALL, routes._asked_to_cancel)
        assert (await cancelling).status_code == 202
        await reaches(other, call, "CANCELLED")


async def test_a_call_that_is_not_kept_is_cancelled_too(nats: Nats) -> None:
    async with world(nats) as w, second(nats) as other:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        calling = asyncio.create_task(w.http.post("/fn/gate", json={}))
        await until(lambda: gate.runs, what="it runs")
        call = gate.runs[0].head.call

        async def cancelled() -> bool:
            return (await other.post(f"/v1/calls/{call}/cancel")).status_code == 202

        await until(lambda: calling.done() or cancelled(), what="its gateway has heard it")
        assert (await calling).json()["error"]["code"] == "cancelled"
        await until(lambda: len(w.gateway.calls) == 0, what="it is over")
        for gateway in (w.http, other):
            again = await gateway.post(f"/v1/calls/{call}/cancel")
            assert (again.status_code, again.json()) == (202, {"id": call, "state": "CANCELLED"})


async def test_nobody_reads_it_any_more(nats: Nats) -> None:
    """One with a key ends after the window; a durable one goes on."""
    async with world(nats, resume_window=0.2) as w:
        gate = Gate()
        await w.deploy(manifest("gate"), entry(), script=gate)
        durable = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        asking = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("left")))
        await until(lambda: len(gate.runs) == 2, what="both run")
        asking.cancel()
        await asyncio.wait([asking])
        left = next(run for run in gate.runs if run.head.call != durable)
        await until(left.cancelled.is_set, what="the one with a key is ended")
        gate.opened.set()
        assert (await reaches(w.http, durable, "SUCCEEDED"))["result"] == [0, 1]


@pytest.mark.parametrize("headers", [SSE, {}])
async def test_a_reader_is_one_also_while_nothing_comes(
    nats: Nats, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway, whichever has the call, hears of it again and again."""
    monkeypatch.setattr(keeping, "READING_S", 0.01)
    async with world(nats) as w:
        gate, heard = Gate(), list[str]()
        await w.deploy(manifest("gate"), entry(), script=gate)
        await (await nats.bus(GATEWAY_2)).subscribe(subjects.READING, Reading, lambda said, _: heard.append(said.call))
        asking = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("quiet") | headers))
        await until(lambda: gate.runs, what="it runs")
        before = len(heard)
        await until(lambda: len(heard) > before + 20, what="the reader is told of")
        gate.opened.set()
        answer = await asking
        assert answer.status_code == 200
        assert set(heard) == {answer.headers["sllm-call-id"]}


async def test_a_reader_at_the_gateway_that_runs_the_call_is_known_without_nats(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "READING_S", 0.01)
    async with world(nats) as w:
        gate, read = Gate(), list[str]()
        await w.deploy(manifest("gate"), entry(), script=gate)
        asking = asyncio.create_task(w.http.post("/fn/gate", json={}, headers=key("quiet")))
        await until(lambda: gate.runs, what="it runs")
        await w.gateway._kept._subscriptions[1].unsubscribe()
        monkeypatch.setattr(w.gateway._detached, "read", read.append)
        await until(lambda: len(read) > 2, what="its own gateway is told")
        gate.opened.set()
        assert set(read) == {(await asking).headers["sllm-call-id"]}


async def test_a_reader_goes_on_to_say_that_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So much waited to be sent for a while that the others were not told."""
    monkeypatch.setattr("sllm_gateway.keeping.READING_S", 0.01)
    told = list[bool]()

    def publish(*_: Any) -> None:
        told.append(len(told) > 0)
        if len(told) == 1:
            raise Unavailable("no room")

    bus, none = cast(Any, SimpleNamespace(publish_now=publish)), cast(Any, None)
    detached = cast(Any, SimpleNamespace(read=lambda _: None, window=60.0))
    reader = keeping.Keeping(bus, detached, none, none, none, none, 0, lambda: 0.0, lambda _: "")
    async with reader._told(cast(Any, SimpleNamespace(call="call-1"))):
        await until(lambda: len(told) > 1, within_s=5.0, what="it is told again")


def test_time_without_nats_is_none_in_which_nobody_reads() -> None:
    """Readers at other gateways cannot say that they are there."""
    none, now, failed = cast(Any, None), 0.0, list[str]()
    calls = cast(Any, SimpleNamespace(fail=lambda call, error: failed.append(error.code)))
    journals = Detached(calls, none, none, none, none, 60.0, lambda: now, none)
    run = cast(Any, SimpleNamespace(asked=asked("call-1"), call=SimpleNamespace(over=False), read=0.0))
    journals._running["call-1"] = run
    for change, later in ((journals.deaf, 1000.0), (journals.hears, 59.0)):
        change()
        now += later
        journals._judge(run)
        assert failed == []
    now += 2.0
    journals._judge(run)
    assert failed == ["cancelled"]


async def test_a_gateway_knows_when_it_cannot_hear_readers(nats: Nats) -> None:
    async with world(nats) as w:
        bus, journals = w.gateway._bus, w.gateway._detached
        await bus._when_disconnected()
        await until(lambda: journals._deaf)
        await bus._when_reconnected()
        await until(lambda: not journals._deaf)


async def test_a_journal_waits_for_jetstream_whatever_its_patience(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else would ever write how the call ended."""
    write, refused = Journal.write, list[str]()

    async def takes_nothing(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        name = entry_name(type(entry), **by)
        if name in ("began", "batch-0", "kept", "ended") and refused.count(name) < 2:
            refused.append(name)
            raise Unavailable("no leader")
        return await write(self, stream, call, entry, *more, **by)

    monkeypatch.setattr(Journal, "write", takes_nothing)
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        call = (await w.http.post("/fn/count", json={"n": 3}, headers=ASYNC)).json()["id"]
        assert await events_of(w.http, call) == written(0, 1, 2)
        assert set(refused) == {"began", "batch-0", "kept", "ended"}
        assert len(w.node.runs) == 1


@pytest.mark.parametrize("headers", [ASYNC, ASYNC | key("k")])
async def test_a_call_that_may_have_been_written_and_was_refused_has_ended(
    nats: Nats, headers: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller was told to call again; so nothing has run."""
    begin, lost = Journal.begin, list[str]()

    async def unheard(self: Journal, stream: str, order: CallOrder, keep_s: float) -> int:
        sequence = await begin(self, stream, order, keep_s)
        if not lost:
            lost.append(order.call)
            raise Unavailable("no answer")
        return sequence

    monkeypatch.setattr(Journal, "begin", unheard)
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        refused = await w.http.post("/fn/count", json={"n": 3}, headers=headers)
        assert (refused.status_code, refused.json()["error"]["retryable"]) == (503, True)
        found = await reaches(w.http, lost[0], "FAILED")
        assert found["error"]["code"] == "unavailable"
        assert not w.node.opened

        async def runs() -> bool:
            return (await w.http.post("/fn/count", json={"n": 3}, headers=headers)).is_success and bool(w.node.opened)

        await until(runs, what="its key is free again")
        assert w.node.opened[0].head.call != lost[0]


async def test_an_order_that_comes_a_second_time_is_the_same_one(nats: Nats, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stood still hands it on when its writer has long asked again."""
    write, again = Stored.write, list[int]()

    async def twice(self: Stored, subject: str, entry: Any, **how: Any) -> int:
        sequence = await write(self, subject, entry, **how)
        if isinstance(entry, CallOrder):
            again.append(sequence)
            return await write(self, subject, entry, **how)
        return sequence

    monkeypatch.setattr(Stored, "write", twice)
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        call = (await w.http.post("/fn/count", json={"n": 3}, headers=ASYNC)).json()["id"]
        assert await events_of(w.http, call) == written(0, 1, 2)
        assert [(await stored(w, call, "order")).seq] == again


async def test_one_that_cannot_be_run_twice_is_said_to_have_begun_before_an_instance_hears_of_it(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateway dies while JetStream does not take that, or right after it."""
    write, refused, gate = Journal.write, list[str](), Gate()

    async def takes_nothing(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, Began):
            refused.append(call)
            if len(refused) < 3:
                await asyncio.sleep(0.01)  # ``_insist`` leaves the patience to the write
                assert not w.node.opened
                raise Unavailable("no leader")
        return await write(self, stream, call, entry, *more, **by)

    monkeypatch.setattr(Journal, "write", takes_nothing)
    async with world(nats) as w:
        await w.deploy(manifest("gate"), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await until(lambda: w.node.opened, what="its instance hears of it")
        assert len(refused) == 3
        began, order = await stored(w, call, "began"), await stored(w, call, "order")
        assert (began.headers or {})["Nats-TTL"] == (order.headers or {})["Nats-TTL"]


async def test_one_that_is_cancelled_before_an_instance_hears_of_it_gives_its_slot_back(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, waits, goes_on = Journal.write, asyncio.Event(), asyncio.Event()

    async def slow(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, Began) and not waits.is_set():
            waits.set()
            await goes_on.wait()
        return await write(self, stream, call, entry, *more, **by)

    monkeypatch.setattr(Journal, "write", slow)
    async with world(nats) as w:
        await w.deploy(manifest("count", concurrency=1), entry(concurrency=1), script=count)
        call = (await w.http.post("/fn/count", json={"n": 3}, headers=ASYNC)).json()["id"]
        await waits.wait()
        monkeypatch.setattr(limits, "LOST_AFTER_S", 0.0)
        assert (await w.http.post(f"/v1/calls/{call}/cancel")).status_code == 202
        await asyncio.sleep(4 * TICK_S)
        (line,) = w.gateway.calls.dispatcher._lines.values()
        assert not line.slots.gone_instances, "its node owes nobody a word"
        monkeypatch.undo()
        goes_on.set()
        await reaches(w.http, call, "CANCELLED")
        other = (await w.http.post("/fn/count", json={"n": 2}, headers=ASYNC)).json()["id"]
        assert await events_of(w.http, other) == written(0, 1)
        assert [each.head.call for each in w.node.opened] == [other]


async def test_the_time_before_its_instance_is_asked_is_no_silence_of_the_function(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, waits, idle_s = Journal.write, asyncio.Event(), 2.0

    async def slow(self: Journal, stream: str, call: str, entry: Entry, *more: Any, **by: Any) -> int:
        if isinstance(entry, Began) and not waits.is_set():
            waits.set()
            await asyncio.sleep(idle_s + 0.2)  # JetStream elects for so long
        return await write(self, stream, call, entry, *more, **by)

    async def thinks(run: Run) -> None:
        await asyncio.sleep(4 * TICK_S)
        run.out(1)
        run.end()

    monkeypatch.setattr(Journal, "write", slow)
    async with world(nats) as w:
        await w.deploy(manifest("thinks", idle_timeout=idle_s), entry(), script=thinks)
        call = (await w.http.post("/fn/thinks", json={}, headers=ASYNC)).json()["id"]
        assert await events_of(w.http, call) == written(1)


def engine(name: str) -> Any:
    return manifest(name, engine=True, resumable=True, model="file:///m")


async def test_a_call_goes_on_in_the_next_life_of_its_gateway(nats: Nats) -> None:
    """What is journaled is not said again; the instance is told how far it was."""
    async with world(nats) as w:

        async def tokens(run: Run) -> None:
            done = run.head.delivered
            for number in range(done, 3 if not done else 6):
                run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
                run.out(number)
            if done:
                run.end()
            else:
                await run.cancelled.wait()
                run.end()

        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=tokens)
        call = (await w.http.post("/fn/tokens", json={}, headers=ASYNC)).json()["id"]

        async def journaled() -> bool:
            info = await w.controller.bus.jetstream.stream_info(
                subjects.CALLS_STREAM, subjects_filter=subjects.call_entries(subjects.CALLS_STREAM, call)
            )
            return any(".batch-" in subject for subject in info.state.subjects or {})

        await until(journaled, what="its tokens are journaled")
    async with world(nats, {"tokens": tokens}) as next_life:
        done = await reaches(next_life.http, call, "SUCCEEDED")
        assert done["result"] == [0, 1, 2, 3, 4, 5]
        head = next_life.node.opened[0].head
        assert 0 < head.delivered <= 3
        assert head.recorded[0][: head.delivered] == tuple(range(head.delivered))
        assert head.epoch > 1
        first, order = await stored(next_life, call, "batch-0"), await stored(next_life, call, "order")
        assert (first.seq or 0) > (order.seq or 0), "what was there would be gone before the answer is"


async def test_a_call_that_is_taken_up_and_waits_for_room_has_not_ended(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another call had its slot first: that it was tried is no call that was turned away."""
    gate, may, tries = asyncio.Event(), asyncio.Event(), 0

    async def tokens(run: Run) -> None:
        done = run.head.delivered
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, done, (done,))))
        run.out(done)
        opened = asyncio.ensure_future(gate.wait())
        stopped = asyncio.ensure_future(run.cancelled.wait())
        await asyncio.wait({opened, stopped}, return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        stopped.cancel()
        run.end()

    described = engine("tokens").model_copy(update={"max_queue": 0, "concurrency": 1, "max_instances": 1})
    async with world(nats) as w:
        await w.deploy(described, entry(fingerprint="f", concurrency=1), script=tokens)
        call = (await w.http.post("/fn/tokens", json={}, headers=ASYNC)).json()["id"]

        async def journaled() -> bool:
            info = await w.controller.bus.jetstream.stream_info(
                subjects.CALLS_STREAM, subjects_filter=subjects.call_entries(subjects.CALLS_STREAM, call)
            )
            return any(".batch-" in subject for subject in info.state.subjects or {})

        await until(journaled, what="its tokens are journaled")
    runs, go_on = taking_up.TakingUp._run, Detached.go_on

    async def late(self: taking_up.TakingUp) -> None:
        await may.wait()
        await runs(self)

    def counted(self: Detached, *asked: Any) -> None:
        nonlocal tries
        tries += 1
        go_on(self, *asked)

    monkeypatch.setattr(taking_up.TakingUp, "_run", late)
    monkeypatch.setattr(Detached, "go_on", counted)
    monkeypatch.setattr(taking_up, "AGAIN_S", 0.05)
    async with world(nats, {"tokens": tokens}) as next_life:
        other = asyncio.create_task(next_life.http.post("/fn/tokens", json={}))
        await until(lambda: next_life.node.runs, what="another one has the slot")
        may.set()
        await until(lambda: tries, what="it is tried, and finds no room")
        assert next_life.gateway._recent.here(call) is None, "`sllm explain` would say that it FAILED"
        text = (await next_life.http.get("/metrics")).text
        assert 'sllm_calls_total{code="queue_full"' not in text, "nobody was turned away"
        gate.set()
        assert (await other).status_code == 200
        await reaches(next_life.http, call, "SUCCEEDED")


@given(st.lists(st.tuples(st.sampled_from((FrameKind.OUTPUT, FrameKind.IDS)), st.booleans()), max_size=12))
def test_no_half_of_a_value_is_written(said: list[tuple[FrameKind, bool]]) -> None:
    frames = [Frame(n, kind, b"", more and kind is not FrameKind.IDS) for n, (kind, more) in enumerate(said)]
    end = whole(frames)
    before, after = ([each.more for each in some if each.kind in VALUES] for some in (frames[:end], frames[end:]))
    assert not any(before[-1:]), "no half one"
    assert all(after), "no whole one waits"
    assert not after or frames[end].kind in VALUES, "nor ids before a half one"


@given(st.lists(st.tuples(st.sampled_from((FrameKind.OUTPUT, FrameKind.IDS)), st.booleans(), st.integers(0, 3))))
def test_of_a_value_in_parts_what_waits_for_the_rest_is_counted(said: list[tuple[FrameKind, bool, int]]) -> None:
    frames = [Frame(n, kind, b"x" * size, more and kind in VALUES) for n, (kind, more, size) in enumerate(said)]
    gathered = Gathered()
    for end, frame in enumerate(frames, 1):
        gathered.take(frame)
        waits = frames[whole(frames[:end]) : end]
        assert gathered.more == bool(waits)
        if waits:
            assert (gathered.nbytes, gathered.frames) == (sum(len(each.data) for each in waits), len(waits))


async def test_what_has_come_of_a_value_in_parts_is_not_missed_where_its_instance_dies(nats: Nats) -> None:
    """Its journal has taken them, and written none: another instance says all of it."""
    value = "x" * (2 * MAX_PART)
    async with world(nats) as w:

        async def parts(run: Run) -> None:
            if len(w.node.runs) == 1:
                run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (1,))))
                run.outbox.push(FrameKind.OUTPUT, json.dumps(value).encode()[:MAX_PART], more=True)
                run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 1, (2,))))
                w.node.flush(run)
                await until(lambda: run.outbox.acked == 3, what="they have come")
                run.end(InstanceLost("its worker died; call again"))
            else:
                run.out(value)
                run.end()

        await w.deploy(engine("parts"), entry(fingerprint="f"), script=parts)
        call = (await w.http.post("/fn/parts", json={}, headers=ASYNC)).json()["id"]
        assert (await reaches(w.http, call, "SUCCEEDED"))["result"] == [value]
        assert len(w.node.runs) == 2


async def test_one_that_cannot_go_on_says_so(nats: Nats) -> None:
    gate = Gate()
    async with world(nats) as w:
        await w.deploy(manifest("gate"), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "RUNNING")
    async with world(nats) as next_life:
        failed = await reaches(next_life.http, call, "FAILED")
        assert failed["error"]["code"] == "instance_lost"
        assert json.dumps("not resumable")[1:-1] in failed["error"]["message"]
    assert len(gate.runs) == 1


async def test_of_one_that_cannot_go_on_it_is_told_and_counted_that_it_failed(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of any other: what is alerted on does not miss what a gateway's death has ended."""
    gate = Gate()
    async with world(nats) as w:
        await w.deploy(manifest("gate"), entry(), script=gate)
        call = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "RUNNING")
        monkeypatch.setattr(w.gateway._announcer, "tell", lambda *_, **__: False)  # it is killed, and says nothing
    async with world(nats) as next_life:
        await reaches(next_life.http, call, "FAILED")
        query = {"kind": "call.failed", "call": call}
        await until(
            lambda: (
                'sllm_calls_total{code="instance_lost",function="gate"} 1.0'
                in next_life.gateway.metrics.text().decode()
            )
        )
        told = [each.data for each in events((await next_life.http.get(f"{API}/events", params=query)).text)]
        found = [json.loads(each) for each in told if each[0] == "{"]
    assert [(each["function"], each["version"], each["fields"]) for each in found] == [
        ("gate", 1, {"code": "instance_lost"})
    ]


async def test_of_one_that_is_gone_on_with_nobody_is_told_that_it_failed(nats: Nats) -> None:
    """Its gateway stops in order; by `retries` the next life begins it again, and it succeeds."""
    opened = asyncio.Event()

    async def silent(run: Run) -> None:
        waiting = [asyncio.ensure_future(event.wait()) for event in (opened, run.cancelled)]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
        if not run.cancelled.is_set():
            run.out(1)
        run.end(Cancelled("it stops") if run.cancelled.is_set() else None)

    async with world(nats) as w:
        await w.deploy(manifest("silent", retries=1), entry(), script=silent)
        call = (await w.http.post("/fn/silent", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "RUNNING")
        await w.gateway.drain()
        await until(lambda: w.gateway.calls.get(call) is None, what="its node has ended it")
    opened.set()
    async with world(nats, {"silent": silent}) as next_life:
        await reaches(next_life.http, call, "SUCCEEDED")
        query = {"kind": "call", "call": call}
        told = [each.data for each in events((await next_life.http.get(f"{API}/events", params=query)).text)]
    assert not [each for each in told if "call.failed" in each]


async def test_calls_that_find_no_room_in_the_queue_leave_nothing(nats: Nats) -> None:
    """Not written, not listed, counted: a thousand a second would fill what is kept for an hour."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate", max_queue=0, concurrency=1, max_instances=1), entry(concurrency=1), script=gate)
        first = (await w.http.post("/fn/gate", json={}, headers=ASYNC)).json()["id"]
        await until(lambda: gate.runs, what="it runs")
        refused = await w.http.post("/fn/gate", json={}, headers=ASYNC | key("k"))
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert [each["id"] for each in (await w.http.get("/v1/calls")).json()["calls"]] == [first]
        assert 'sllm_calls_total{code="queue_full",function="gate"} 1.0' in (await w.http.get("/metrics")).text


async def test_the_key_of_a_call_that_was_refused_is_soon_free(nats: Nats) -> None:
    """Nothing was begun for it: it does not stand for as long as one whose call is being written."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate", max_queue=0, concurrency=1, max_instances=1), entry(concurrency=1), script=gate)
        first = asyncio.create_task(w.http.post("/fn/gate", json={}))
        await until(lambda: gate.runs, what="it runs")
        assert (await w.http.post("/fn/gate", json={}, headers=key("k"))).status_code == 429

        async def free() -> bool:
            return (await w.controller.bus.jetstream.stream_info(subjects.KEYS_STREAM)).state.messages == 0

        await until(free, CLAIMED_S / 2, what="its key is free")
        gate.opened.set()
        assert (await first).json() == [0, 1]
        again = await w.http.post("/fn/gate", json={}, headers=key("k"))
        assert (again.status_code, again.json()) == (200, [0, 1])


async def test_an_answer_whose_beginning_lapsed_gets_no_other_end(nats: Nats) -> None:
    async def tokens(run: Run) -> None:
        for number in range(2):
            run.out(number)
            await until(lambda: run.outbox.acked == run.outbox.next_index, what="it is written")
        await run.cancelled.wait()
        run.end()

    async with world(nats) as w:
        await w.deploy(engine("tokens"), entry(fingerprint="f"), script=tokens)
        call = (await w.http.post("/fn/tokens", json={}, headers=ASYNC)).json()["id"]

        async def written() -> bool:
            return (await w.gateway._kept._journal.now(subjects.CALLS_STREAM, call))[0].batches == 2

        await until(written, what="both batches are written")
        lapsed = subjects.call_entry(subjects.CALLS_STREAM, call, "batch-0")
        await w.controller.bus.jetstream.purge_stream(subjects.CALLS_STREAM, subject=lapsed)
    async with world(nats, {"tokens": tokens}) as next_life:
        await reaches(next_life.http, call, "FAILED")
        assert '"code":"journal_expired"' in await events_of(next_life.http, call)
        assert not next_life.node.opened


@pytest.mark.parametrize("path", ["", "/events", "/cancel"])
@pytest.mark.parametrize("wrong", ["foo.bar", "abc%0A", "a%20b", "*", "x" * 81])
async def test_what_can_be_no_id_is_no_call(nats: Nats, wrong: str, path: str) -> None:
    async with world(nats) as w:
        method = "POST" if path == "/cancel" else "GET"
        answer = await w.http.request(method, f"/v1/calls/{wrong}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "call_not_found")


@pytest.mark.parametrize("limit", ["0", "1001", "x", "9" * 5000])
async def test_a_limit_that_is_none_is_refused(nats: Nats, limit: str) -> None:
    async with world(nats) as w:
        answer = await w.http.get("/v1/calls", params={"limit": limit})
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "limit")


async def test_what_a_generator_answered_is_an_array_also_when_it_is_deleted(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(manifest("count"), entry(), script=count)
        call = (await w.http.post("/fn/count", json={"n": 1}, headers=ASYNC)).json()["id"]
        assert (await reaches(w.http, call, "SUCCEEDED"))["result"] == [0]
        await w.controller.unroute("count")
        await until(lambda: w.gateway.table.get("count", 1) is None, what="it is deleted")
        assert (await state_of(w.http, call))["result"] == [0]


@pytest.mark.parametrize(("yielded", "answer"), [(True, [7]), (False, 7)])
async def test_a_whole_answer_is_as_the_call_was_and_not_as_its_hints_say(
    nats: Nats, yielded: bool, answer: Any
) -> None:
    async def says(run: Run) -> None:
        run.out(7)
        run.end(yielded=yielded)

    async with world(nats) as w:
        await w.deploy(manifest("says", streams=not yielded), entry(), script=says)
        assert (await w.http.post("/fn/says", json={})).json() == answer
        for _ in range(2):  # while it runs, and once it has ended
            assert (await w.http.post("/fn/says", json={}, headers=key("k"))).json() == answer
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        assert (await reaches(w.http, call, "SUCCEEDED"))["result"] == answer


async def test_a_result_is_the_functions_own_json(nats: Nats) -> None:
    async def says(run: Run) -> None:
        run.outbox.push_value(FrameKind.OUTPUT, b'{"b": 1.50,  "a": 1e2}')
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("says", streams=False), entry(), script=says)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        assert (await w.http.get(f"/v1/calls/{call}")).text.endswith('"result":{"b": 1.50,  "a": 1e2}}')


async def test_a_whole_answer_is_bounded_as_without_a_key_and_its_stream_is_not(nats: Nats) -> None:
    value = "x" * 4096

    async def says(run: Run) -> None:
        run.out(value)
        run.end()

    async with world(nats, max_output=1024) as w:
        await w.deploy(manifest("says"), entry(), script=says)
        for headers in ({}, key("k"), key("k")):  # while it runs, and once it has ended
            answer = await w.http.post("/fn/says", json={}, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "output_too_large")
        stream = await w.http.post("/fn/says", json={}, headers=key("k") | SSE)
        assert json.loads(stream.text.partition("data: ")[2].partition("\n")[0]) == value
        found = await reaches(w.http, stream.headers["sllm-call-id"], "SUCCEEDED")
        assert (found["result"], found["error"]["code"]) == (None, "output_too_large")


async def test_a_value_of_a_kept_call_is_bounded_as_a_whole_answer_is(nats: Nats) -> None:
    """It waits here until all of it has come: whatever its size, it is not more than this gateway has room for."""

    async def says(run: Run) -> None:
        run.out("first")
        value = json.dumps("x" * (run.arguments["n"] - 2)).encode()
        for start in range(0, len(value), MAX_PART):
            more = start + MAX_PART < len(value)
            run.outbox.push(FrameKind.OUTPUT, value[start : start + MAX_PART], more=more)
            w.node.flush(run)
            await run.room()
            if run.cancelled.is_set():
                break
        run.end()

    most = 4 * limits.WINDOW
    async with world(nats, max_output=most) as w:
        await w.deploy(manifest("says"), entry(), script=says)
        for headers in (ASYNC, key("k") | SSE):
            answer = await w.http.post("/fn/says", json={"n": most}, headers=headers)
            text = await events_of(w.http, answer.headers["sllm-call-id"])
            assert (text.count("id: "), len(text) > most, "[DONE]" in text) == (2, True, True)
        for n in (most + 1, most + 4 * limits.WINDOW):
            call = (await w.http.post("/fn/says", json={"n": n}, headers=ASYNC)).json()["id"]
            failed = await reaches(w.http, call, "FAILED")
            assert failed["error"]["code"] == "output_too_large"
            assert f"a value of the answer is larger than {most} bytes" in failed["error"]["message"]
            text = await events_of(w.http, call)
            assert text.startswith('id: 0\ndata: "first"\n\nevent: error\n'), text[:200]
        run = w.node.runs[call, 1]
        await until(run.cancelled.is_set, what="its instance has heard it")
        assert run.outbox.pushed_bytes < most + 3 * limits.WINDOW


async def test_of_a_value_that_another_instance_says_anew_what_the_first_one_said_does_not_count(nats: Nats) -> None:
    most = 4 * MAX_PART
    async with world(nats, max_output=most) as w:

        async def says(run: Run) -> None:
            value = json.dumps("x" * (most - 2)).encode()
            parts = [value[start : start + MAX_PART] for start in range(0, most, MAX_PART)]
            for number, part in enumerate(parts[: 3 if len(w.node.runs) == 1 else None], 1):
                run.outbox.push(FrameKind.OUTPUT, part, more=number < len(parts))
                w.node.flush(run)
            if len(w.node.runs) == 1:
                await until(lambda: run.outbox.acked == 3, what="they have come")
                run.end(InstanceLost("its worker died; call again"))
            else:
                run.end()

        await w.deploy(engine("says"), entry(fingerprint="f"), script=says)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        assert (await reaches(w.http, call, "SUCCEEDED"))["result"] == ["x" * (most - 2)]
        assert len(w.node.runs) == 2


@pytest.mark.parametrize("ends", [True, False])
async def test_of_an_answer_that_is_too_large_its_status_reads_no_more_than_shows_it(
    nats: Nats, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    said, batches = asyncio.Event(), list[int]()

    async def says(run: Run) -> None:
        for _ in range(24):
            run.out("x" * (MAX_PART - 2))
            await run.room()
        said.set()
        if not ends:
            await run.cancelled.wait()
        run.end(usage=Usage(prompt=1, completion=2))

    entries = Journal.entries

    async def noted(journal: Journal, stream: str, call: str) -> AsyncGenerator[Entry | None, None]:
        async with aclosing(entries(journal, stream, call)) as found:
            async for each in found:
                batches.append(isinstance(each, Batch))
                yield each

    async with world(nats, max_output=MAX_PART) as w:
        await w.deploy(manifest("says"), entry(exact=False), script=says)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        await asyncio.wait_for(said.wait(), GIVE_UP_S)
        before = await reaches(w.http, call, "SUCCEEDED" if ends else "RUNNING")
        monkeypatch.setattr(Journal, "entries", noted)
        answer = await w.http.get(f"/v1/calls/{call}")
        found = answer.json()
        assert found == before
        assert answer.headers["sllm-exact"] == "false"
        assert int(ends) <= sum(batches) <= 2 * ends
        assert (found["started"] is None, found["finished"] is None, found["result"]) == (False, not ends, None)
        if ends:
            assert (found["error"]["code"], found["usage"]["completion"]) == ("output_too_large", 2)


async def test_a_long_history_comes_in_pieces_and_not_where_it_is_no_longer_kept(nats: Nats) -> None:
    async def says(run: Run) -> None:
        for _ in range(16):
            run.out("x" * MAX_PART)
            await run.room()
        run.end()

    async with world(nats) as w:
        await w.deploy(manifest("says"), entry(), script=says)
        call = (await w.http.post("/fn/says", json={}, headers=ASYNC)).json()["id"]
        await reaches(w.http, call, "SUCCEEDED")
        kept = w.gateway._kept._keeping
        order = (await kept._journal.find(call))[1]
        source = kept._read(order, After(stream_of(order), -1), True)
        pieces = [len(piece) async for piece in source]
        assert sum(pieces) > 16 * MAX_PART
        assert max(pieces) < PIECE + 2 * BATCH_BYTES
        purged = subjects.call_entry(subjects.CALLS_STREAM, call, "kept")
        await w.controller.bus.jetstream.purge_stream(subjects.CALLS_STREAM, subject=purged)
        expired = await w.http.get(f"/v1/calls/{call}/events")
        assert (expired.status_code, expired.json()["error"]["code"]) == (410, "journal_expired")


async def test_a_key_whose_call_was_refused_may_try_again_at_once(nats: Nats) -> None:
    """Nothing was begun for it. Those that ask with it at the same time are all told."""
    async with world(nats) as w:
        gate = Gate()
        await w.deploy(manifest("gate", max_queue=0, concurrency=1, max_instances=1), entry(concurrency=1), script=gate)
        first = asyncio.create_task(w.http.post("/fn/gate", json={}))
        await until(lambda: gate.runs, what="it runs")
        asking = (w.http.post("/fn/gate", json={}, headers=key("k")) for _ in range(3))
        for refused in await asyncio.gather(*asking):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        gate.opened.set()
        assert (await first).json() == [0, 1]
        again = await w.http.post("/fn/gate", json={}, headers=key("k"))
        assert (again.status_code, again.text) == (200, "[0,1]")
        joined = await w.http.post("/fn/gate", json={}, headers=key("k"))
        assert joined.headers["sllm-call-id"] == again.headers["sllm-call-id"]


async def test_one_that_ends_before_its_instance_is_asked_takes_no_place_there(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written before may take as long as JetStream is away."""
    began, waits = Detached._began, asyncio.Event()

    async def late(self: Detached, run: Any) -> None:
        if not waits.is_set():
            waits.set()
            await asyncio.Event().wait()
        await began(self, run)

    monkeypatch.setattr(Detached, "_began", late)
    async with world(nats) as w:
        await w.deploy(manifest("count", concurrency=1, max_instances=1), entry(concurrency=1), script=count)
        call = (await w.http.post("/fn/count", json={"n": 1}, headers=ASYNC)).json()["id"]
        await until(waits.is_set, what="it has its place")
        assert (await w.http.post(f"/v1/calls/{call}/cancel")).status_code == 202
        assert (await w.http.post("/fn/count", json={"n": 2}, headers=key("k"))).json() == [0, 1]
        assert (await state_of(w.http, call))["state"] == "CANCELLED"


async def test_a_refused_key_whose_time_ends_as_it_is_claimed_is_free(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, gone = Stored.write, list[str]()
    async with world(nats) as w:
        journal = w.gateway._detached._journal
        await journal.hold("k", KeyClaim(call="call-1", body=b"1", refused=True), 60.0)

        async def late(self: Stored, subject: str, message: Any, **options: Any) -> int:
            if options["where"].sequence and not gone:
                gone.append(subject)
                await w.controller.bus.jetstream.purge_stream(subjects.KEYS_STREAM, subject=subject)
            return await write(self, subject, message, **options)

        monkeypatch.setattr(Stored, "write", late)
        mine = KeyClaim(call="call-2", body=b"2")
        assert await journal.claim("k", mine) == mine
        assert gone == [subjects.key_claim("k")]


async def test_who_learns_that_another_gateway_has_the_call_blames_no_instance(
    nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is about to ask one again, after a time without NATS."""
    ask, told = Link.open, list[str]()

    async def moved(self: Link, node: str, request: Any, before: Any = None) -> Any:
        if not told:
            told.append(request.head.call)
            raise CallMoved("another gateway has it")
        return await ask(self, node, request, before)

    monkeypatch.setattr(Link, "open", moved)
    async with world(nats) as w:
        await w.deploy(manifest("count", concurrency=1, max_instances=1), entry(concurrency=1), script=count)
        first = await w.http.post("/fn/count", json={"n": 2})
        assert first.json()["error"]["code"] == "call_moved"
        assert (await w.http.post("/fn/count", json={"n": 2})).json() == [0, 1]
        assert not any(asked.gone for asked in w.controller.acquires)
