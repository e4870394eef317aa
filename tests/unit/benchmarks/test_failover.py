"""``benchmarks.failover`` without its platform: what an interruption is, and that no error makes an aim vanish."""

from __future__ import annotations

from benchmarks import failover_streams
from benchmarks.failover import GIVE_UP_S, Calls, judge
from benchmarks.heard import Heard, Sums
from benchmarks.record import Aim
from benchmarks.runner import Run


def met(aims: list[Aim]) -> dict[str, bool | None]:
    return {aim.aim: aim.met for aim in aims}


def test_an_interruption_is_the_longest_time_between_two_answers_around_the_fault() -> None:
    calls = Calls(answers=[1.0, 4.0, 4.5, 6.5, 6.75])
    assert calls.longest(fault=5.0) == 2.0, "from the answer before it"
    assert calls.longest(fault=6.5) == 0.25
    assert calls.usual(fault=5.0) == [3.0, 0.5]
    assert Calls().longest(fault=5.0) == GIVE_UP_S, "nobody ever answered"
    assert Calls(answers=[1.0, 2.0]).longest(fault=2.5) == GIVE_UP_S


def test_broken_streams_and_failed_calls_make_aims_false() -> None:
    run = Run(quick=False)
    found = run.case("killed", "sllm")
    found.samples += [100.0] * 6 + [3500.0]
    judge(run, found, broken=1, failed=["ProgramFailed: HTTP 503"])
    assert set(met(run.aims).values()) == {False}
    assert "HTTP 503" in found.notes


def test_a_case_that_broke_at_once_judges_no_latency() -> None:
    run = Run(quick=False)
    judge(run, run.case("killed", "sllm"), broken=0, failed=[])
    assert met(run.aims) == {
        "killed: longest interruption of acquire, ms": None,
        "killed: streams interrupted": None,
        "killed: calls failed": None,
    }
    few = Run(quick=True)
    case = few.case("killed", "sllm")
    case.samples += [100.0] * 3
    judge(few, case, broken=0, failed=[])
    assert set(met(few.aims).values()) == {None}, "three faults are no proof"


def test_a_stream_that_broke_off_counts_with_what_it_did_not_say() -> None:
    run, sums = Run(quick=True), Sums()
    sums.add(Heard(0, ids=[0], values=["a"], times=[1.0], error="not ended"), ["a", "b"])
    failover_streams.judge(run, run.case("node", "sllm"), sums)
    assert met(run.aims) == {"node: tokens lost, repeated or changed": False, "node: streams broken off": False}


def test_a_case_without_enough_streams_proves_nothing() -> None:
    for streams, verdict in ((0, None), (6, None), (7, True)):
        run, sums = Run(quick=True), Sums(streams=streams)
        failover_streams.judge(run, run.case("node", "sllm"), sums)
        assert set(met(run.aims).values()) == {verdict}
