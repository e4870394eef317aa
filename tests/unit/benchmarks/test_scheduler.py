"""``benchmarks.scheduler`` on a small cluster: whose decisions are judged, and of what kind they are."""

from __future__ import annotations

import random

import pytest

from benchmarks import scheduler
from benchmarks.runner import Run
from benchmarks.scheduler import LOCALITY, Asked
from sllm_runtime.control.scheduling.policies import POLICIES


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "NODES", 10)
    monkeypatch.setattr(scheduler, "MODELS", 50)
    monkeypatch.setattr(scheduler, "CROWD", 20)


def test_each_policy_has_the_aim_and_locality_is_asked_for_what_it_can_place() -> None:
    run = Run(quick=True)
    scheduler._decide(run)
    evenly = f"{LOCALITY}, asked for evenly"
    systems = [*POLICIES, evenly]
    assert [aim.aim.rpartition("no migration, ")[2] for aim in run.aims] == systems
    assert {aim.at_least for aim in run.aims} == {10_000}
    kinds = run.case("decide", evenly).extra
    assert kinds["place"] > kinds.get("wait", 0)


def test_whole_plans_of_each_policy_are_measured() -> None:
    run = Run(quick=True)
    scheduler._crowd(run)
    assert {case.system for case in run.cases} == set(POLICIES)
    assert all(len(case.samples) == run.rounds and case.extra["decisions"] > 0 for case in run.cases)


def test_what_is_asked_for_evenly_is_any() -> None:
    keys, rng = [(f"f{number}", 1) for number in range(10)], random.Random(1)
    evenly, by_zipf = ([Asked(keys, evenly=each).one(rng) for _ in range(1000)] for each in (True, False))
    assert evenly.count(keys[0]) < 200 < by_zipf.count(keys[0])
    assert set(evenly) == set(keys)
