"""Numbers that were asked for by name: what a test compares with the constant itself moves with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import estimator_starts, migration, replay, replay_client, replay_trace, scheduler
from benchmarks.chaos import LEAST_IN_ALL, LEAST_OF_EACH
from benchmarks.migration_load import Called
from benchmarks.runner import Run
from benchmarks.scheduler_cluster import GPUS
from sllm_runtime.control.scheduling.policies import POLICIES


def test_a_run_of_chaos_counts_where_so_many_faults_met_a_call() -> None:
    """Of each kind in a full one, in all in a quick one and in ``make test``."""
    assert (LEAST_OF_EACH, LEAST_IN_ALL) == (20, 6)


def test_how_far_an_estimate_may_be_off() -> None:
    assert estimator_starts.DRAM == (5.0, 0.03)
    assert estimator_starts.SSD == (15.0, 0.04)


def test_with_a_search_for_moves_two_thousand_decisions_a_second_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (scheduler.NODES, scheduler.MODELS, GPUS) == (100, 1000, 8)
    monkeypatch.setattr(scheduler, "NODES", 10)
    monkeypatch.setattr(scheduler, "MODELS", 50)
    run = Run(quick=True)
    scheduler._moves(run)
    assert {aim.at_least for aim in run.aims} == {2_000}


@pytest.mark.parametrize(("quick", "wanted"), [(False, 1000), (True, 100)])
def test_so_many_migrations_are_wanted(quick: bool, wanted: int) -> None:
    called = cast(Called, SimpleNamespace(platform=cast(Any, None)))
    assert migration._fate(Run(quick=quick), "move", called).wanted == wanted


def test_the_replay_is_of_what_was_asked_for() -> None:
    scene = replay.FULL.scene
    assert (scene.nodes, scene.devices, scene.functions) == (4, 4, 32)
    assert (replay_trace.CV, replay_client.LIMIT_S) == (8.0, 300.0)
    assert set(replay.POLICIES) == set(POLICIES)
