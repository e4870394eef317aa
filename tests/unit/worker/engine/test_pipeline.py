"""Stages in processes of their own: the same bits as one process, several steps on their way, stages that die."""

from __future__ import annotations

import os
import queue
import signal
import threading
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from sllm_runtime.protocol.errors import (
    InstanceLost,
    InvalidRequest,
    ModelNotFound,
    ProtocolError,
    SllmError,
    StartFailed,
    Unavailable,
)
from sllm_runtime.worker.engine.base import Request
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.scheduler import Limits
from sllm_runtime.worker.engine.sinks import Piece, ThreadSink
from tests.fixtures.nursery import Nursery, kill
from tests.fixtures.suspended import suspend
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.worker.engine.driver import Letters, engine, finish, ids, kept, page_bytes, request, run
from tests.unit.worker.engine.pipelines import stages

pytestmark = pytest.mark.timeout(300)  # the first waits for the imports of another process


ASKED = [
    request(0, range(5, 60), max_tokens=30),
    request(1, [7] * 290, max_tokens=20, temperature=0.8, seed=3),
    request(2, range(3, 9), max_tokens=40, repetition_penalty=1.3, logprobs=2),
    request(3, range(3, 100), max_tokens=9, temperature=1.2, seed=4, top_k=20),
]


@pytest.mark.parametrize(
    ("name", "cuts", "dtype"),
    [
        ("gemma 3", (0, 1, 3, 4), torch.float32),
        ("llama tied", (0, 1, 2, 3), torch.bfloat16),
        ("opt 350m", (0, 2, 3), torch.float32),
        ("mixtral", (0, 1, 3), torch.bfloat16),
    ],
)
def test_stages_compute_the_bits_of_one_process(
    nursery: Nursery, name: str, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    whole = engine(name, dtype=dtype)
    expected = kept(whole)
    tokens = run(whole, *ASKED)
    with stages(nursery, name, *cuts, depth=1, dtype=dtype) as made:
        got = kept(made.core)
        assert run(made.core, *ASKED) == tokens
        assert [(each.low, each.high) for each in made.pipeline.stages] == list(pairwise(cuts))
    assert len(got) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))


def many(count: int) -> list[Request]:
    return [replace(ASKED[number % 4], id=number) for number in range(count)]


@pytest.mark.parametrize("tcp", [False, True], ids=["shared memory", "tcp"])
def test_steps_overtake_nothing_however_many_are_on_their_way(nursery: Nursery, tcp: bool) -> None:
    """Over TCP one step's rows are more than a message, and more than the sockets hold, both ways round."""
    expected = run(engine("llama"), *ASKED)
    limits = Limits(prefill=2048, quantum=2048)
    with stages(nursery, "llama", 0, 1, 2, 3, tcp=tcp, limits=limits) as made:
        core, most = made.core, 0
        for each in many(17):
            core.add(each)
        events: dict[int, list[Any]] = {}
        while core.busy:
            for event in core.step():
                events.setdefault(event.request, []).append(event)
            most = max(most, len(core._steps))
        assert {number: ids(each) for number, each in events.items()} == {n: expected[n % 4] for n in range(17)}
        assert most == 2, "three on their way, of which a step ends one"


def test_ids_are_fed_while_steps_are_on_their_way(nursery: Nursery) -> None:
    """One, several, none, and such as are being drawn just then, which are not taken twice."""
    expected, fed, turn = run(engine("llama"), *ASKED), 0, 0
    with stages(nursery, "llama", 0, 1, 2, 3, limits=Limits(prefill=40, quantum=16)) as made:
        got = dict.fromkeys(range(8), tuple[int, ...]())
        for each in many(8):
            made.core.add(each)
        while made.core.busy:
            number, size = turn % 8, (1, 2, 0, 7)[turn // 8 % 4]
            first = max(0, len(got[number]) - turn % 3)
            new = made.core.feed(number, first, expected[number % 4][first : first + size])
            got[number] += new
            fed, turn = fed + len(new), turn + 1
            for event in made.core.step():
                got[event.request] += ids([event])
    assert got == {number: expected[number % 4] for number in range(8)}
    assert fed > 8


def test_what_is_held_draws_when_it_is_let(nursery: Nursery) -> None:
    expected = run(engine("llama"), *ASKED)
    with stages(nursery, "llama", 0, 1, 2, 3, limits=Limits(prefill=40, quantum=16)) as made:
        for each in many(8):
            made.core.add(replace(each, held=True))
        rested = [event for each in finish(made.core).values() for event in each]
        assert [event.rests for event in rested] == [True] * 8
        fed = {number: made.core.feed(number, 0, expected[number % 4][:7]) for number in range(8)}
        for number in range(8):
            made.core.release(number)
        got = {number: fed[number] + ids(events) for number, events in finish(made.core).items()}
    assert fed[0] == expected[0][:7]
    assert got == {number: expected[number % 4] for number in range(8)}


def test_what_is_held_while_it_draws_goes_on_when_it_is_let(nursery: Nursery) -> None:
    """What is on its way through the stages is told; nothing more then."""
    expected = run(engine("llama"), *ASKED)
    with stages(nursery, "llama", 0, 1, 2, 3, limits=Limits(prefill=40, quantum=16)) as made:
        for each in many(8):
            made.core.add(each)
        got: dict[int, list[int]] = {number: [] for number in range(8)}
        before, rested = dict[int, int](), set[int]()
        while len(before) < 8 or made.core.busy:
            for event in made.core.step():
                got[event.request] += event.ids
                rested |= {event.request} if event.rests else set()
            for number in [number for number, each in got.items() if len(each) >= 3 and number not in before]:
                before[number] = len(got[number])
                made.core.hold(number)
        assert rested == {*range(8)}
        assert all(len(each) <= before[number] + 1 for number, each in got.items())
        for number in range(8):
            made.core.release(number)
        for number, events in finish(made.core).items():
            got[number] += ids(events)
    assert {number: tuple(each) for number, each in got.items()} == {n: tuple(expected[n % 4]) for n in range(8)}


def test_joins_leaves_sleeps_and_too_little_memory_change_no_token(nursery: Nursery) -> None:
    expected = run(engine("llama"), *ASKED)
    with stages(nursery, "llama", 0, 1, 2, 3, limits=Limits(prefill=40, quantum=16), kv=3 * page_bytes()) as made:
        core, got = made.core, {number: list[int]() for number in range(12)}
        turn = -1
        while (turn := turn + 1) < 70 or core.busy:
            if turn % 3 == 0 and turn < 36:
                core.add(many(12)[turn // 3])
            if turn == 20:
                core.cancel(5)
            if turn == 25:
                state = core.export(7)
                core.cancel(7)
                core.add(replace(state.request, emitted=state.ids))
                got[7] = list(state.ids)
            if turn in (31, 60):
                core.sleep()
                assert not core.busy
                assert core.step() == []
                core.wake()
            collect(core, got, steps=1)
        assert core.stats().preempted > 2, "the cache holds no more than a few of them"
        core.scheduler.check()
        del got[5]
        assert got == {number: list(expected[number % 4]) for number in got}


def test_a_call_goes_from_stages_to_a_whole_model_and_back(nursery: Nursery) -> None:
    """Mode switch (λScale, section 4): KV is computed again from tokens."""
    first = ASKED[2]
    whole = engine("llama")
    expected = run(whole, first)[2]
    with stages(nursery, "llama", 0, 2, 3) as made:
        cores, got, asked = [made.core, whole, made.core], list[int](), first
        for core in cores:
            core.add(asked)
            while core.busy and len(got) < 10 * (1 + cores.index(core)):
                got += [token for event in core.step() for token in event.ids]
            if core.busy:
                state = core.export(2)
                assert list(state.ids) == got
                core.cancel(2)
                asked = replace(first, emitted=state.ids)
        core.add(asked)
        got += [token for event in finish(core)[2] for token in event.ids]
    assert tuple(got) == expected


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stage_that_dies_ends_every_call_at_once_and_they_go_on_elsewhere(nursery: Nursery, victim: int) -> None:
    expected = run(engine("llama"), *ASKED)
    why = rf"stage of layers \[{victim + 1}, {victim + 2}\) is gone"
    with stages(nursery, "llama", 0, 1, 2, 3) as made:
        core, got = made.core, {each.id: list[int]() for each in ASKED}
        for each in ASKED:
            core.add(replace(each, sampling=replace(each.sampling, max_tokens=200)))
        while not all(got.values()):
            collect(core, got, steps=1)
        kill(made.pids[victim])
        with pytest.raises(InstanceLost, match=why):
            collect(core, got)
        for each in ASKED:
            core.cancel(each.id)
        assert not core.busy, "nothing is left that would be stepped for ever"
        loop = EngineLoop(core, Letters())
        loop.start()
        try:
            for sink in [ThreadSink() for _ in range(3)]:
                loop.submit(ASKED[0], sink)
                with pytest.raises(InstanceLost, match=why):
                    list(sink)
        finally:
            loop.close()
        told: list[SllmError] = []
        released = threading.Event()
        loop = EngineLoop(core, Letters(), release=released.set)
        loop.on_lost(told.append)
        loop.start()
        sink = ThreadSink()
        loop.submit(ASKED[0], sink)
        assert released.wait(GIVE_UP_S), "the thread ends by itself"
        assert [str(error) for error in told] == [str(why_lost(core))]
        assert sink._pieces.empty(), "its process is to be ended, and what it says then would be taken for an answer"
        loop.close()
    whole = engine("llama")
    for each in ASKED:
        had = tuple(got[each.id])[: each.sampling.max_tokens]
        assert had + run(whole, replace(each, emitted=had)).get(each.id, ()) == expected[each.id]


def why_lost(core: OurEngine) -> SllmError:
    with pytest.raises(InstanceLost) as caught:
        core.runner.sleep()
    return caught.value


def collect(core: OurEngine, got: dict[int, list[int]], steps: int = 10_000) -> None:
    """Step, and keep the ids of each request."""
    for _ in range(steps):
        for event in core.step():
            assert event.error is None
            got[event.request] += event.ids


async def test_a_stage_that_hangs_is_given_up_in_time(nursery: Nursery) -> None:
    with stages(nursery, "llama", 0, 2, 3) as made:
        suspend(made.pids[0])
        try:
            made.pipeline._edges.patience_s = 0.2
            made.core.add(ASKED[0])
            with pytest.raises(InstanceLost, match="says nothing"):
                made.core.step()
            assert not made.core._steps
            made.core.cancel(0)
            assert not made.core.busy, "nothing is left that would be stepped for ever"
        finally:
            os.kill(made.pids[0], signal.SIGKILL)


def test_a_stage_begins_with_the_layers_it_has(nursery: Nursery) -> None:
    expected = run(engine("llama"), ASKED[0])
    gate, hold = os.pipe()
    try:
        with stages(nursery, "llama", 0, 1, 3, pipes=(gate,)) as made:
            made.core.add(ASKED[0])
            os.write(hold, b"1")
            os.write(hold, b"2")
            assert {0: ids(finish(made.core)[0])} == expected
        with stages(nursery, "llama", 0, 1, 3, pipes=(gate,)) as made:
            os.write(hold, b"1")
            os.close(hold)
            hold = -1
            made.core.add(ASKED[0])
            with pytest.raises(Unavailable, match="layer 2 does not come"):
                finish(made.core)
    finally:
        os.close(gate)
        if hold >= 0:
            os.close(hold)


@pytest.mark.parametrize("cuts", [(0, 1, 3), (0, 1, 2, 3)])
def test_a_stage_that_fails_is_told_to_no_call(nursery: Nursery, cuts: tuple[int, ...]) -> None:
    """Whatever it was, memory, a GPU or a bug: its process has ended, so all calls go on elsewhere."""
    gate, hold = os.pipe()
    try:
        with stages(nursery, "llama", *cuts, pipes=(gate,), stage={"bug": True}) as made:
            os.close(hold)
            hold, lost, sink = -1, queue.Queue[SllmError](), ThreadSink()
            loop = EngineLoop(made.core, Letters())
            loop.on_lost(lost.put)
            loop.start()
            try:
                loop.submit(ASKED[0], sink)
                error = lost.get(timeout=GIVE_UP_S)
            finally:
                loop.close()
        assert isinstance(error, InstanceLost)
        why = f"what computes layers [{cuts[-2]}, {cuts[-1]}) failed: MemoryError: no room for the rows of layer"
        assert error.message.startswith(why)
        assert sink._pieces.empty()
    finally:
        os.close(gate)
        if hold >= 0:
            os.close(hold)


def test_a_head_that_fails_is_told_to_no_call(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a stage behind it: the pipeline is closed by that, so its process ends, and all calls go on elsewhere."""

    def broken(*_: object) -> None:
        raise MemoryError("no room for the rows of layer 0")

    with stages(nursery, "llama", 0, 1, 3) as made:
        sink = ThreadSink()
        loop = EngineLoop(made.core, Letters())
        loop.on_lost(lambda error: sink.put(Piece(error=error)))
        monkeypatch.setattr(type(made.core.decoder), "run", broken)
        loop.start()
        try:
            loop.submit(ASKED[0], sink)
            with pytest.raises(InstanceLost, match="MemoryError: no room for the rows of layer 0"):
                list(sink)
        finally:
            loop.close()


def test_a_bug_in_one_step_gives_nobody_the_rows_of_another(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(engine("llama"), *ASKED)

    def broken(*_: object) -> None:
        raise ZeroDivisionError

    with stages(nursery, "llama", 0, 1, 2, 3) as made:
        core = made.core
        for each in many(8):
            core.add(replace(each, id=100 + each.id))
        for _ in range(12):
            core.step()
        with monkeypatch.context() as patched:
            patched.setattr("sllm_runtime.worker.engine.ours.engine.choose_rows", broken)
            with pytest.raises(ZeroDivisionError):
                core.step()
        for number in range(8):
            core.cancel(100 + number)
        assert run(core, *ASKED) == expected


def test_what_stages_cannot_is_refused_by_name_and_nobody_else_notices(nursery: Nursery) -> None:
    expected = run(engine("llama"), *ASKED)
    with stages(nursery, "llama", 0, 1, 3) as made:
        core = made.core
        found = core.capabilities
        assert (found.lora, found.layer_ranges, found.sleep, found.holds) == (True,) * 4
        assert (found.prompt_logprobs, found.kv_transfer, found.retells) == (False, False, False)
        for each in ASKED:
            core.add(each)
        events = {event.request: [event] for event in core.step()}
        with pytest.raises(InvalidRequest, match="no log probabilities of a prompt") as refused:
            core.add(request(9, prompt_logprobs=1))
        assert refused.value.field == "logprobs"
        with pytest.raises(ModelNotFound, match="no adapter 'x'") as unknown:
            core.add(replace(request(9), lora="x"))
        assert unknown.value.field == "model"
        assert core.export_pages(1) == []
        whole = engine("llama")
        whole.add(ASKED[1])
        while len(pages := whole.export_pages(1)) < 2:
            whole.step()
        assert core.import_pages(pages) == 0
        assert {number: ids(each) for number, each in finish(core, events).items()} == expected


def test_stages_that_are_not_alike_are_refused_by_the_head(nursery: Nursery) -> None:
    others: list[tuple[type[SllmError], str, dict[str, Any]]] = [
        (StartFailed, "other bits", {"fingerprint": "other"}),
        (ProtocolError, "take", {"dtype": "bfloat16"}),
        (ProtocolError, "comes before", {"low": 2}),
        (ProtocolError, "are not all", {"high": 2}),
    ]
    for kind, why, stage in others:
        with pytest.raises(kind, match=why), stages(nursery, "llama", 0, 1, 3, stage=stage):
            pass
