"""Which faults come when, and what the benchmark of faults calls met, lost, broken and a gap."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.chaos import LEAST_IN_ALL, Outcome, Struck, judge
from benchmarks.chaos_client import Told
from benchmarks.chaos_faults import Tally, Victim
from benchmarks.chaos_schedule import GAP_S, KINDS, STOPPED_S, Fault, Kind, schedule
from benchmarks.migration import Heard
from benchmarks.runner import Run

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


def told(*, kept: bool = False, error: str = "", times: tuple[float, ...] = (1.0, 2.0, 9.0)) -> Told:
    heard = Heard(0, list(range(len(times))), list("abcdef"[: len(times)]), list(times), error)
    return Told(heard, kept, gateways=["http://one"], begun=0.0, ended=10.0, done=not error)


def test_a_stream_that_ends_with_its_gateway_is_broken_and_any_other_lost() -> None:
    plain, kept, fine = told(error="cut"), told(kept=True, error="cut"), told()
    mine, others, later = (struck("gateway", at, url) for at, url in ((3, "http://one"), (3, "http://two"), (11, "")))
    outcome = Outcome(struck=[mine, struck("nats", 3.0)], told=[plain, kept, fine])
    assert (outcome.broken(), outcome.lost()) == ([plain], [kept])
    outcome.struck = [others, later]
    assert (outcome.broken(), outcome.lost()) == ([], [plain, kept])


def test_the_gap_after_a_fault() -> None:
    """Up to the next one, of streams that it came upon; one that both fall into is of both."""
    late = told(times=(4.0, 5.0))
    outcome = Outcome(struck=[struck("nats", 1.5), struck("worker", 3.0), struck("loaderd", 9.5)], told=[told(), late])
    assert outcome.gaps("nats killed") == [7.0]
    assert outcome.gaps("worker killed") == [7.0]
    assert outcome.gaps("loaderd killed") == []
    outcome.struck[:1] = [struck("nats", 1.5), struck("gateway", 1.7)]
    assert outcome.gaps("nats killed") == [1.0]


def test_a_run_with_too_few_faults_that_met_a_call_is_void() -> None:
    for count, met in ((LEAST_IN_ALL, True), (LEAST_IN_ALL - 1, None)):
        run = Run(quick=True)
        outcome = Outcome(struck=[struck("nats", 3.0)] * count + [struck("worker", 3.0, met=False)], told=[told()])
        judge(run, outcome, "embedded")
        assert {aim.met for aim in run.aims} == {met}
    run = Run(quick=False)
    judge(run, Outcome(struck=[struck("nats", 3.0)] * 500), "embedded")
    assert {aim.met for aim in run.aims} == {None}


def test_a_counter_over_several_lives() -> None:
    tally = Tally()
    for one, other in ((3, 1), (5, 1), (2, 4), (4, 0)):
        tally.take({"one": one, "other": other})
    tally.take({"one": 6})
    assert tally.sum == 5 + 6 + 4 + 0
