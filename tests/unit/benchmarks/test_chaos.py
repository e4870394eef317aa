"""Which faults come when, and what the benchmark of faults calls met, lost, broken and a gap."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import chaos, chaos_faults
from benchmarks.chaos import GROWN_MIB, LEAST_IN_ALL, Outcome, Plan, Struck, _strike_on, judge
from benchmarks.chaos_client import UNKNOWN, YOUNG_S, Cut, Reader, Told
from benchmarks.chaos_faults import Field, Tally, Victim, beyond_models
from benchmarks.chaos_moves import Moves, outcome_of
from benchmarks.chaos_schedule import GAP_S, KINDS, STOPPED_S, Fault, Kind, schedule
from benchmarks.heard import Heard
from benchmarks.platform import Platform
from benchmarks.runner import Run
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.loader import PoolStatus, ResidentStatus, Status

SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.integers(1, 5), st.floats(*STOPPED_S))
def test_every_kind_comes_once_before_any_comes_again(seed: int, rounds: int, longest: float) -> None:
    faults = list(itertools.islice(schedule(seed, longest), rounds * len(KINDS)))
    for at in range(0, len(faults), len(KINDS)):
        assert {fault.kind for fault in faults[at : at + len(KINDS)]} == set(KINDS)
    for fault in faults:
        assert GAP_S[0] <= fault.gap_s <= GAP_S[1]
        stopped = fault.kind.signal == "stopped"
        assert (STOPPED_S[0] <= fault.stopped_s <= longest) if stopped else fault.stopped_s == 0


@given(SEEDS)
def test_a_seed_is_a_schedule(seed: int) -> None:
    first, second, other = (list(itertools.islice(schedule(each), 24)) for each in (seed, seed, seed + 1))
    assert first == second
    assert first != other


@given(SEEDS, st.integers(1, 9))
def test_some_one_of_those_there_are_is_struck(seed: int, count: int) -> None:
    those = list(range(count))
    picked = Counter(fault.of(those) for fault in itertools.islice(schedule(seed), 600))
    assert set(picked) == set(those)


def struck(component: str, begin: float, gateway: str = "", met: bool = True) -> Struck:
    fault = Fault(Kind(component, "killed"), 0.0, 0.0, 0.0)
    return Struck(fault, Victim(component, 1, gateway), begin, begin, met)


def told(*times: float, error: str = "") -> Told:
    heard = Heard(0, list(range(len(times))), list("abcdef"[: len(times)]), list(times), error)
    return Told(heard, kept=False, gateways=["http://one"], begun=0.0, ended=10.0, done=not error)


def test_the_gap_after_a_fault() -> None:
    """Up to the next one, of streams that it came upon; one that both fall into is of both."""
    long, late = told(1.0, 2.0, 9.0), told(4.0, 5.0)
    outcome = Outcome(struck=[struck("nats", 1.5), struck("worker", 3.0), struck("loaderd", 9.5)], told=[long, late])
    assert outcome.gaps("nats killed") == [7.0]
    assert outcome.gaps("worker killed") == [7.0]
    assert outcome.gaps("loaderd killed") == []
    outcome.struck[:1] = [struck("nats", 1.5), struck("gateway", 1.7)]
    assert outcome.gaps("nats killed") == [1.0]


def test_a_run_with_too_few_faults_that_met_a_call_is_void() -> None:
    for count, met in ((LEAST_IN_ALL, True), (LEAST_IN_ALL - 1, None)):
        run = Run(quick=True)
        outcome = Outcome(
            struck=[struck("nats", 3.0)] * count + [struck("worker", 3.0, met=False)], told=[told(1.0, 2.0)]
        )
        judge(run, outcome, "embedded")
        assert {aim.met for aim in run.aims} == {met}
    run = Run(quick=False)
    judge(run, Outcome(struck=[struck("nats", 3.0)] * 500), "embedded")
    assert {aim.met for aim in run.aims} == {None}
    judge(run, Outcome(struck=[struck("nats", 3.0)], told=[told(1.0, error="cut")]), "void")
    assert {aim.aim: aim.met for aim in run.aims}["void: calls lost"] is False, "what went wrong counts in any run"


def test_memory_in_use_beyond_the_models_is_left() -> None:
    chunk, model = 16 * MIB, 15 * MIB
    known = ResidentStatus(model="m", partition=0, nbytes=model, total=model, pinned=False, holders=())

    def status(used: int, retiring: int = 0) -> Status:
        pool = PoolStatus(
            chunk_bytes=chunk, limit=8 * chunk, free=chunk, prefaulted=chunk, used=used, held=0, retiring=retiring,
            reserved=0,
        )  # fmt: skip
        return Status(request=1, pid=1, pool=pool, resident=(known,), paths=(), models=(), disk_free=0)

    assert beyond_models(status(chunk)) == 0
    assert beyond_models(status(2 * chunk)) == chunk
    assert beyond_models(status(chunk, retiring=chunk)) == chunk


@pytest.mark.parametrize(("heard", "again"), [((), True), ((1.0, 1.0 + YOUNG_S / 2), True), ((1.0, 2.0), False)])
def test_only_a_stream_that_had_just_begun_may_be_unknown(heard: tuple[float, ...], again: bool) -> None:
    """Of any other nobody's not knowing it is a loss."""
    cut = told(*heard)
    cut.done, cut.call = False, "call-1"
    reader = Reader(["http://one"], "token", "f", {}, cut, first=0)
    answer = httpx.Response(404, json={"error": {"code": UNKNOWN, "retryable": False}})
    if again:
        with pytest.raises(Cut):
            reader._accepted(answer, 200)
    else:
        assert not reader._accepted(answer, 200)
    assert (cut.again == 1, UNKNOWN in cut.heard.error) == (again, not again)


def test_a_call_that_failed_is_lost_and_one_that_is_forgotten_begins_anew() -> None:
    lost, fine, again = told(1.0, error="cut"), told(1.0, 2.0), told(1.0, 2.0)
    again.forget()
    assert (again.call, again.again, again.heard.ids, again.heard.values, again.heard.times) == ("", 1, [], [], [])
    assert Outcome(told=[lost, fine, again]).lost() == [lost]


@pytest.mark.parametrize(
    ("code", "retryable", "state", "again"),
    [
        ("unavailable", True, "SUCCEEDED", True),  # of its reader: all of the call is there
        ("unavailable", True, "RUNNING", True),
        ("call_moved", True, "FAILED", True),
        ("instance_lost", True, "FAILED", False),  # of the call
        ("journal_expired", False, "SUCCEEDED", False),  # nobody can read it any more
    ],
)
def test_an_error_of_the_call_is_told_from_one_of_its_reader(
    code: str, retryable: bool, state: str, again: bool
) -> None:
    view = httpx.MockTransport(lambda _: httpx.Response(200, json={"state": state}))
    kept = Told(Heard(0), kept=True, call="call-1")
    reader = Reader(["http://one"], "token", "f", {}, kept, first=0)
    data = json.dumps({"error": {"code": code, "retryable": retryable}})
    with httpx.Client(base_url="http://one", transport=view) as client:
        if again:
            with pytest.raises(Cut):
                reader._broken(client, data)
        else:
            reader._broken(client, data)
    assert bool(kept.heard.error) is not again


def test_a_counter_over_several_lives() -> None:
    tally = Tally()
    for one, other in ((3, 1), (5, 1), (2, 4), (4, 0)):
        tally.take({"one": one, "other": other})
    tally.take({"one": 6})
    assert tally.sum == 5 + 6 + 4 + 0


@pytest.mark.parametrize(
    ("status", "state", "moves"),
    [
        (200, "DONE", Moves(asked=1, done=1)),
        (200, "ABANDONED", Moves(asked=1, refused=1)),
        (409, "", Moves(asked=1, refused=1)),
        (202, "MOVING", Moves(asked=1)),
        (503, "", Moves(asked=1)),
    ],
)
def test_what_came_of_a_move(status: int, state: str, moves: Moves) -> None:
    """Of one that goes on, or of which nobody can say anything, nothing is counted: it is asked again."""
    counted = Moves(asked=1)
    counted.count(outcome_of(httpx.Response(status, json={"state": state} if state else {"error": {}})))
    assert counted == moves


def test_what_a_run_leaves_and_begins_again_are_aims_of_zero_and_leaders_are_told() -> None:
    run, again = Run(quick=True), told(1.0, 2.0)
    again.forget()
    hit = [replace(struck("controller", 3.0), leads=leads) for leads in (True, True, False, None)]
    heaps = ({"gateway-g1": 50.0, "controller-1": 60.0}, {"gateway-g1": 51.0, "controller-1": 61.0 + GROWN_MIB})
    outcome = Outcome(struck=hit * 2, told=[again], memory_left_mib=16.0, heaps_mib=heaps)
    judge(run, outcome, "embedded")
    values = {aim.aim.removeprefix("embedded: "): (aim.value, aim.met) for aim in run.aims}
    assert values["calls begun again"] == (1.0, False)
    assert values["memory of models left, MiB"] == (16.0, False)
    assert values["memory that a daemon has grown by, MiB"] == (GROWN_MIB + 1.0, False)
    assert run.cases[0].extra["grown_most"] == "controller-1"
    assert run.cases[0].notes == "controller killed: 4 leading, 2 not"


def test_the_record_says_what_came_of_the_moves() -> None:
    run, moved = Run(quick=True), Struck(struck("nats", 3.0).fault, Victim("nats", 1), 3.0, 3.0, met=True, moving=True)
    judge(run, Outcome(struck=[moved, struck("worker", 4.0)], told=[told(1.0, 5.0)], moves=Moves(9, 6, 2)), "embedded")
    extra = run.cases[0].extra
    assert (extra["moves_asked"], extra["moves_done"], extra["moves_refused"], extra["faults_in_moves"]) == (9, 6, 2, 1)


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_fault_whose_victim_had_gone_befell_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen before all callers are waited for: until then an instance may have moved away and ended. Such a
    fault is none, so it is no one of those of which a run needs so many."""
    gone, there = sleeper(), sleeper()
    try:
        gone.kill()
        gone.wait()
        victims = iter([Victim("gone", gone.pid)] * 2 + [Victim("there", there.pid)] * 2)
        killed = Fault(Kind("worker", "killed"), 0.0, 0.0, 0.0)
        monkeypatch.setattr(chaos, "schedule", lambda *_: itertools.repeat(killed))
        place: Any = SimpleNamespace(victim=lambda _: next(victims), leads=lambda _: None, mend=lambda: None)
        callers: Any = SimpleNamespace(until_all_hear=lambda _: None, in_flight=lambda *_: 4, gateways=(), token="")
        outcome = Outcome()
        _strike_on(Run(quick=True), place, callers, cast(Any, SimpleNamespace(moving=False)),
                   Plan(seed=1, seconds=0.0, least=1), outcome)  # fmt: skip
        assert [each.victim.name for each in outcome.struck if each.met] == ["there"]
        assert there.wait(10.0) == -9, "the run went on until a fault met a call"
    finally:
        for each in (gone, there):
            each.kill()
            each.wait()


@pytest.mark.parametrize("component", ["invoker", "loaderd"])
def test_while_nobody_can_say_where_instances_are_no_node_is_struck(
    monkeypatch: pytest.MonkeyPatch, component: str
) -> None:
    """The gateway that is asked was killed just before: any node would do, also one that has nothing to do."""
    me = os.getpid()
    running = SimpleNamespace(urls=("http://one",), pids={f"{component}-n1": me, f"{component}-n2": me})
    monkeypatch.setattr(chaos_faults, "running_of", lambda _: running)
    there: dict[str, str] = {}
    monkeypatch.setattr(Field, "ready", lambda _: there)
    field = Field(cast(Platform, None), "f")
    assert field.victims(component) == []
    there["i"] = "n2"
    assert [each.name for each in field.victims(component)] == [f"{component}-n2"]


@contextlib.contextmanager
def gateway(answer: bytes) -> Iterator[str]:
    """One that takes one request and says ``answer``; nothing: it dies with the call in its hands."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection, connection.makefile("rb") as asked:
                head = b"".join(iter(asked.readline, b"\r\n")).lower()
                asked.read(int(head.partition(b"content-length:")[2].split()[0]))  # what is not read resets it
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def test_a_call_that_is_made_anew_since_its_gateway_died_before_its_head_is_told() -> None:
    """The head of an answer waits for a second: until then it may run, and its caller has no id by which to ask for
    it. It is in the record; what was never sent has begun nothing."""
    whole = b'HTTP/1.1 200 OK\r\nsllm-call-id: call-2\r\nconnection: close\r\n\r\nid: 0\ndata: "a"\n\ndata: [DONE]\n\n'
    with gateway(b"") as dies, gateway(whole) as other:
        told = Told(Heard(0), kept=False)
        Reader((dies, other), "token", "f", {}, told, first=0).read()
    assert (told.heard.values, told.heard.error, told.cuts) == (["a"], "", 1)
    run = Run(quick=True)
    judge(run, Outcome(struck=[struck("gateway", 3.0)] * LEAST_IN_ALL, told=[told]), "embedded")
    assert (run.cases[0].extra["called_anew"], run.cases[0].extra["called_again"]) == (1, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    with gateway(whole) as other:
        told = Told(Heard(0), kept=False)
        Reader((nobody, other), "token", "f", {}, told, first=0).read()
    assert (told.heard.values, told.cuts, told.anew) == (["a"], 1, 0)
