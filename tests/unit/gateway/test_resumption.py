"""A call that goes on elsewhere when its instance dies."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.ctl import Acquire, Acquired
from sllm_runtime.protocol.errors import InstanceLost, NotDeterministic
from sllm_runtime.protocol.frames import End, Frame, FrameKind, Ids
from sllm_runtime.protocol.limits import ID_END, KIB, MAX_MESSAGE, MAX_PART, MOST_GENERATIONS, MOST_IDS
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import Progress
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.gateway.peer import Run, entry, manifest, starting, world
from tests.unit.gateway.test_faults import SSE, values

KINDS = (FrameKind.OUTPUT, FrameKind.DELTA)


def ids(generation: int, first: int, *numbers: int) -> Frame:
    return Frame(0, FrameKind.IDS, codec.pack(Ids(generation, first, numbers)))


def part(data: bytes, *, more: bool = False) -> Frame:
    return Frame(0, FrameKind.OUTPUT, data, more)


# --- what is kept ---------------------------------------------------------------------------------
@pytest.mark.parametrize("more", [0, 1, 3])
def test_what_an_earlier_gateway_had_comes_again_or_nothing_does(more: int) -> None:
    """Also where the call begins again, and however little of it is whole."""
    before = Resumption()
    before.take([part(b"a"), part(b"b", more=True), part(b"c"), part(b"d", more=True)])
    for state in (Resumption(before.delivered, before.digest), Resumption(before.delivered, before.digest).anew()):
        state.take([part(b"a"), part(b"bc"), *[part(b"e")] * more])
        assert state.delivered == 2 + more
        with pytest.raises(NotDeterministic, match="first 2 outputs"):
            state.anew().take([part(b"a"), part(b"x"), *[part(b"e")] * more])


@given(st.lists(st.lists(st.binary(max_size=3), min_size=1, max_size=3), max_size=6), st.data())
def test_whole_outputs_count_however_they_come(outputs: list[list[bytes]], data: st.DataObject) -> None:
    """The hash is the worker's: over the bytes of all whole outputs; a half one is taken out again."""
    frames = [
        Frame(0, data.draw(st.sampled_from(KINDS)), piece, more=at < len(output) - 1)
        for output in outputs
        for at, piece in enumerate(output)
    ]
    cut = data.draw(st.integers(0, len(frames)))
    whole, kept = 0, hashlib.blake2b(digest_size=16)
    pending: list[bytes] = []
    for frame in frames[:cut]:
        pending.append(frame.data)
        if not frame.more:
            kept.update(b"".join(pending))
            whole, pending = whole + 1, []
    state = Resumption()
    state.take(frames[:cut])
    assert state.delivered == whole
    assert state.digest == (kept.digest() if whole else b"")
    assert state.hashed().digest() == kept.digest()
    state.watch()
    assert state.digest_at(whole) == kept.digest()
    waiting = list(frames[:cut])
    halves = state.break_off(waiting)
    assert halves is not None
    assert len(halves) == len(pending)
    assert waiting == frames[: cut - len(pending)]
    state.take(frames[cut - len(pending) :])
    everything = b"".join(frame.data for frame in frames)
    assert state.digest == (hashlib.blake2b(everything, digest_size=16).digest() if outputs else b"")


def test_parts_that_have_come_are_not_kept() -> None:
    """An output is as large as its function makes it; its caller has them."""
    state, data = Resumption(), bytes(MAX_PART)
    known = sys.getrefcount(data)
    state.take([part(data, more=True)])
    assert state.half
    assert sys.getrefcount(data) == known


def test_half_an_output_that_its_caller_reads_cannot_be_taken_back() -> None:
    state = Resumption()
    first, second = part(b"[1,", more=True), part(b"2,", more=True)
    state.take([first, second])
    assert state.break_off([second]) is None


def test_ids_are_kept_by_generation_up_to_the_first_gap() -> None:
    state = Resumption()
    state.take([ids(0, 0, 1, 2), ids(2, 0, 9), ids(0, 2, 3), ids(0, 7, 8)])
    assert state.recorded == ((1, 2, 3), (), (9,))


def test_what_a_generation_found_computed_is_its_first_instances_word() -> None:
    kept = Resumption()
    for generation, first, cached in ((1, 0, 256), (1, 1, None), (1, 0, 0), (3, 0, -1), (2, 0, None)):
        kept.take([Frame(0, FrameKind.IDS, codec.pack(Ids(generation, first, (7,), False, cached)))])
    assert kept.cached == (None, 256)
    assert kept.anew().cached == ()


def test_generations_are_bounded() -> None:
    state = Resumption()
    state.take([ids(MOST_GENERATIONS - 1, 0, 1), ids(MOST_GENERATIONS, 0, 1)])
    assert len(state.recorded) == MOST_GENERATIONS


def test_ids_are_bounded() -> None:
    state = Resumption()
    state.take([ids(0, 0, *range(MOST_IDS)), ids(0, MOST_IDS, 1), ids(10**9, 0, 1)])
    assert len(state.recorded) == 1
    assert len(state.recorded[0]) == MOST_IDS


@pytest.mark.parametrize("none", [-1, ID_END, 2**63])
def test_what_can_be_no_id_is_not_kept(none: int) -> None:
    """It takes more of a message than is counted for one."""
    state = Resumption()
    state.take([ids(0, 0, 1, 2), ids(0, 2, 3, none), ids(0, 4, 5), ids(0, 2, ID_END - 1)])
    assert state.recorded == ((1, 2, ID_END - 1),)


def test_a_call_that_kills_what_it_runs_on_is_given_up() -> None:
    state = Resumption()
    assert state.break_off([]) == []
    assert state.break_off([]) is None
    state = Resumption()
    for _ in range(5):  # it had no part in those
        assert state.break_off([], stopped=True) == []
    assert state.break_off([]) == []
    assert state.break_off([]) is None
    state = Resumption()
    state.take([ids(0, 0, 1, 2)])
    assert state.break_off([]) == []
    for _ in range(2):  # others of another numerics class have not come further
        state = state.anew(deaths=True)
        state.take([ids(0, 0, 3)])
        last = state.break_off([])
    assert last is None
    state = Resumption()
    for number in range(5):  # each time something new came of it
        state.take([part(b"%d" % number)])
        assert state.break_off([]) == []


# --- the whole gateway ------------------------------------------------------------------------------
async def twenty(run: Run) -> None:
    """As a worker does: says which ids it drew, leaves out what the caller has. Dies once, in the middle."""
    (known, *_) = (*run.head.recorded, ())
    for number in range(20):
        if number >= len(known):
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, number, (number,))))
        if number >= run.head.delivered:
            run.out(number)
        if number == 7 and not known:
            await until(lambda: run.outbox.acked >= 15)
            run.end(InstanceLost("the worker died"))
            return
    run.end()


async def test_tokens_of_open_calls_are_counted_as_they_come(nats: Nats) -> None:
    """Those that an instance draws again for another are no more of them."""
    go = asyncio.Event()

    async def waits(run: Run) -> None:
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (1, 2, 3))))
        run.out("begun")
        await go.wait()
        run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 1, (2, 3, 4))))
        await run.cancelled.wait()
        run.end()

    async with world(nats) as w:
        await w.deploy(engine("waits"), entry(fingerprint="f"), script=waits)

        async def drawn(count: str) -> bool:
            return f'sllm_tokens_open{{function="waits"}} {count}' in (await w.http.get("/metrics")).text

        async with w.http.stream("POST", "/fn/waits", headers=SSE):
            await until(lambda: drawn("3.0"), what="three are counted")
            go.set()
            await until(lambda: drawn("4.0"), what="a fourth is")
        await until(lambda: len(w.gateway.calls) == 0, what="it is over")
        assert "sllm_tokens_open{" not in (await w.http.get("/metrics")).text


def engine(name: str, **fields: Any) -> Manifest:
    return manifest(name, **{"model": "sha256:m", "engine": True, **fields})


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_stream_goes_on_where_it_stopped(nats: Nats, streamed: bool) -> None:
    async with world(nats) as w:
        await w.deploy(engine("twenty"), entry(fingerprint="f"), script=twenty)
        response = await w.http.post("/fn/twenty", json={}, headers=SSE if streamed else {})
        assert (values(response.text) if streamed else response.json()) == list(range(20))
        first, second = (opened.head for opened in w.node.opened)
        assert (first.epoch, second.epoch) == (1, 2)
        assert second.recorded == (tuple(range(8)),)
        assert second.delivered == 8
        assert second.delivered_hash == hashlib.blake2b(b"01234567", digest_size=16).digest()
        assert [(kind, why) for kind, _, why in await w.told(second.call)] == [("call.resumed", "the worker died")]
        assert first.seed == second.seed
        assert first.created == second.created > 0
        metrics = (await w.http.get("/metrics")).text
        assert 'sllm_calls_resumed_total{function="twenty"} 1.0' in metrics
        assert 'sllm_calls_total{code="ok",function="twenty"} 1.0' in metrics


async def test_event_ids_go_on_too(nats: Nats) -> None:
    async with world(nats) as w:
        await w.deploy(engine("twenty"), entry(fingerprint="f"), script=twenty)
        text = (await w.http.post("/fn/twenty", json={}, headers=SSE)).text
        assert [line for line in text.split("\n") if line.startswith("id: ")] == [f"id: {n}" for n in range(20)]


@pytest.mark.parametrize("fields", [{"resumable": False}, {"engine": False, "model": None}])
async def test_what_is_not_resumable_ends_at_once(nats: Nats, fields: dict[str, Any]) -> None:
    async with world(nats) as w:
        await w.deploy(engine("twenty", **fields), entry(fingerprint="f"), script=twenty)
        text = (await w.http.post("/fn/twenty", json={}, headers=SSE)).text
        assert values(text)[:-1] == list(range(8))
        assert values(text)[-1]["error"]["code"] == "instance_lost"  # type: ignore[index]
        assert len(w.node.opened) == 1


async def test_another_numerics_class_does_not_go_on(nats: Nats) -> None:
    async with world(nats) as w:

        async def dies(run: Run) -> None:
            run.out(0)
            await until(lambda: run.outbox.acked >= 1)
            await w.deploy(engine("twenty"), entry("i2", fingerprint="g"), script=dies)
            run.end(InstanceLost("the worker died"))

        await w.deploy(engine("twenty"), entry(fingerprint="f"), script=dies)
        text = (await w.http.post("/fn/twenty", json={}, headers=SSE)).text
        error = values(text)[-1]["error"]  # type: ignore[index]
        assert error["code"] == "instance_lost"
        assert "computes other bits" in error["message"]


async def test_it_goes_on_at_an_instance_of_its_class_though_others_are_freer(nats: Nats) -> None:
    async with world(nats) as w:
        others = [entry("other", fingerprint="g"), entry("same", fingerprint="f", concurrency=1)]

        async def dies(run: Run) -> None:
            if run.head.recorded:
                await twenty(run)
                return
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (0,))))
            run.out(0)
            await until(lambda: run.outbox.acked >= 2)
            await w.deploy(engine("twenty"), *others, script=dies)
            run.end(InstanceLost("the worker died"))

        await w.deploy(engine("twenty"), entry(fingerprint="f"), script=dies)
        text = (await w.http.post("/fn/twenty", json={}, headers=SSE)).text
        assert values(text) == list(range(20))
        assert [opened.head.instance for opened in w.node.opened] == ["i1", "same"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_another_numerics_class_draws_anew_what_nobody_has_seen(nats: Nats, streamed: bool) -> None:
    """Its ids are not mixed with those of the class before, also where it dies in turn."""
    async with world(nats) as w:

        async def dies(run: Run) -> None:
            number = len(w.node.opened)
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, len(run.head.recorded), (number,) * (4 - number))))
            run.node.flush(run)
            await until(lambda: run.outbox.acked >= 1)
            if number == 3:
                run.out("done")
                run.end()
                return
            await w.deploy(engine("late"), entry(f"i{number}", fingerprint="g"), script=dies)
            run.end(InstanceLost("the worker died"))

        await w.deploy(engine("late"), entry(fingerprint="f", exact=False), script=dies)
        answer = await w.http.post("/fn/late", json={}, headers=SSE if streamed else {})
        assert (values(answer.text) if streamed else answer.json()) == ["done"]
        assert [opened.head.recorded for opened in w.node.opened] == [(), (), ((2, 2),)]
        assert streamed or "sllm-exact" not in answer.headers, "nothing of it is of the first one"


async def test_a_journal_that_has_ids_is_not_gone_on_with_by_another_class(nats: Nats) -> None:
    async with world(nats) as w:

        async def dies(run: Run) -> None:
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, 0, (1,))))
            run.node.flush(run)
            await until(lambda: run.outbox.acked >= 1)
            await w.deploy(engine("late"), entry("i2", fingerprint="g"), script=dies)
            run.end(InstanceLost("the worker died"))

        await w.deploy(engine("late"), entry(fingerprint="f"), script=dies)
        answer = await w.http.post("/fn/late", json={}, headers={"idempotency-key": "k"})
        assert answer.json()["error"]["code"] == "instance_lost"
        assert "computes other bits" in answer.json()["error"]["message"]


async def test_a_call_with_many_ids_and_a_large_request_goes_on(nats: Nats) -> None:
    """Its head leaves no room for the body, which follows."""
    text, many = "x" * (300 * KIB), 48_000

    async def script(run: Run) -> None:
        if run.head.epoch > 1:
            run.out(len(run.arguments["text"]))
            run.end()
            return
        for first in range(0, many, 4000):
            run.outbox.push(FrameKind.IDS, codec.pack(Ids(0, first, tuple(range(2**17 + first, 2**17 + first + 4000)))))
        run.node.flush(run)
        await until(lambda: run.outbox.done or run.outbox.acked == many // 4000)
        run.end(InstanceLost("the worker died"))

    async with world(nats) as w:
        await w.deploy(engine("large"), entry(fingerprint="f"), script=script)
        assert (await w.http.post("/fn/large", json={"text": text})).json() == [len(text)]
        first, second = w.node.opened
        assert (len(first.first), len(second.first)) == (2, 0)
        assert sum(map(len, second.head.recorded)) == many
        assert len(codec.pack(second)) <= MAX_MESSAGE


async def test_an_output_in_parts_that_broke_off_unread_comes_whole(nats: Nats) -> None:
    big = "x" * (3 * MAX_PART)

    async def script(run: Run) -> None:
        if run.head.epoch == 1:
            data = json.dumps(big).encode()
            run.outbox.push(FrameKind.OUTPUT, data[:MAX_PART], more=True)
            run.node.flush(run)
            await until(lambda: run.outbox.acked >= 1)
            run.end(InstanceLost("the worker died"))
            return
        run.out(big)
        run.end()

    async with world(nats) as w:
        await w.deploy(engine("big"), entry(fingerprint="f"), script=script)
        assert (await w.http.post("/fn/big", json={})).json() == [big]
        assert w.node.opened[1].head.delivered == 0


async def test_instances_that_are_ended_in_order_are_no_deaths(nats: Nats) -> None:
    """A call without a token yet goes on, however often that is."""

    async def script(run: Run) -> None:
        if len(w.node.opened) < 5:
            run.outbox.push(FrameKind.END, codec.pack(End(error=InstanceLost("stopped").body(), stopped=True)))
            number = len(w.node.opened) + 1
            await w.deploy(engine("moved"), entry(f"i{number}", fingerprint="f"), script=script)
            run.node.flush(run)
            return
        run.out("done")
        run.end()

    async with world(nats) as w:
        await w.deploy(engine("moved"), entry("i1", fingerprint="f"), script=script)
        assert (await w.http.post("/fn/moved", json={})).json() == ["done"]
        assert len(w.node.opened) == 5


async def test_it_waits_for_a_new_instance(nats: Nats) -> None:
    """Meanwhile its caller hears that there is something coming; then the stream goes on."""
    async with world(nats) as w:

        async def script(run: Run) -> None:
            if run.head.delivered:
                run.out(1)
                run.end()
                return
            run.out(0)
            await until(lambda: run.outbox.acked >= 1)
            await w.deploy(engine("two"))
            run.end(InstanceLost("the worker died"))

        async def started(request: Acquire) -> Acquired:
            w.node.report(starting("two", Progress(stage="weights", done=1, total=2), "i2"))
            return Acquired(route=await w.controller.route(engine("two"), entry("i2", fingerprint="f")))

        w.controller.on_acquire = started
        await w.deploy(engine("two"), entry("i1", fingerprint="f"), script=script)
        response = await w.http.post("/fn/two", json={}, headers=SSE)
        assert [value for value in values(response.text) if not isinstance(value, dict)] == [0, 1]
        assert [opened.head.instance for opened in w.node.opened] == ["i1", "i2"]


async def test_it_waits_for_a_new_instance_as_long_as_it_may_have_waited_for_the_first(nats: Nats) -> None:
    async with world(nats) as w:

        async def script(run: Run) -> None:
            run.out(0)
            await until(lambda: run.outbox.acked >= 1)
            await w.deploy(described)
            run.end(InstanceLost("the worker died"))

        described = engine("waits", queue_timeout=120)
        await w.deploy(described, script=script)
        reading = asyncio.create_task(w.http.post("/fn/waits", json={}, headers=SSE))
        await until(lambda: w.gateway.calls.dispatcher.waiting("waits") == 1)
        (call,) = w.gateway.calls.open()
        call.marks.waited = 60.0
        await w.deploy(described, entry(fingerprint="f"))
        await until(lambda: call.attempts and w.gateway.calls.dispatcher.waiting("waits") == 1, what="it waits again")
        assert call.marks.waited < 60.0
        w.gateway.calls.cancel(call.id)
        assert values((await reading).text)[0] == 0
