"""Faults of several kinds under load, by the benchmark of them: every stream is right, whoever dies meanwhile."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from benchmarks.chaos import GROWN_MIB, LEAST_IN_ALL, Plan, wreck
from benchmarks.chaos_schedule import STOPPED_S
from benchmarks.runner import Run
from tests.fixtures.deployed import FUNCTIONS
from tests.fixtures.modules import own_modules


@pytest.mark.chaos
@pytest.mark.timeout(1800)  # each wait within has a deadline of its own; together they are far beyond the usual limit
def test_no_call_is_lost_and_no_token_lost_repeated_or_changed(tmp_path: Path, coder: Path) -> None:
    """For a minute, and until as many faults met a call as make a run count, whatever time they take."""
    function = tmp_path / "paced" / "function.py"
    shutil.copytree(coder, function.parent)
    shutil.copy(FUNCTIONS / "paced_coder.py", function)
    with own_modules():
        plan = Plan(seed=SEED, seconds=60.0, longest_s=STOPPED_S[0], function=function, tokens=TOKENS)
        run = Run(quick=True)
        outcome = wreck(run, tmp_path, plan, run.case("embedded", "sllm"))
    assert outcome.met().total() >= LEAST_IN_ALL
    assert [(told.call, told.heard.error) for told in outcome.lost()] == []
    assert (outcome.sums.lost, outcome.sums.repeated, outcome.sums.different) == (0, 0, 0)
    assert outcome.sums.events > 0
    assert outcome.moves.done > 0
    assert outcome.tallies["moved"].sum > 0, "calls went with the instances"
    assert outcome.tallies["resumed"].sum > 0, "a worker was killed"
    assert outcome.called_again == 0
    assert not outcome.processes_left
    assert outcome.memory_left_mib == 0
    assert outcome.grown[0] <= GROWN_MIB, outcome.grown


TOKENS = 110
"""Six seconds and more of a call: faults come upon all of them."""
SEED = 2424
"""Its first six kinds: loaderd, gateway, worker and controller killed, a gateway stopped, NATS killed."""
