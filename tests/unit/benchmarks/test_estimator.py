"""The sums of ``benchmarks.estimator``, and one start of it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.estimator_starts import DRAM, LEAST, SSD, Start, cause, tell
from benchmarks.runner import Run

TERMS: Mapping[str, float] = {
    "release": 0.0,
    "sandbox": 5.0,
    "import": 5.0,
    "queue": 20.0,
    "read": 80.0,
    "setup": 2.0,
    "rest": 3.0,
}
STAGES: Mapping[str, float] = {"sandbox": 5.0, "import": 5.0, "weights": 100.0, "setup": 2.0, "rest": 3.0}


def from_ssd(took: float, **stages: float) -> Start:
    return Start("m64", "ssd", 105.0, took, {**STAGES, **stages}, TERMS)


def test_errors_are_summed_and_judged() -> None:
    run = Run(quick=False)
    starts = [Start("f", "dram", expected=100.0 + number % 5, took=100.0) for number in range(LEAST)]
    tell(run, "dram", starts, DRAM)
    ours, constant, spread = run.cases
    assert (len(ours.samples), len(constant.samples)) == (LEAST, LEAST - 1)
    assert ours.extra["p95_ms"] == 4.0
    assert constant.extra["p95_ms"] == 0.0
    assert (spread.system, spread.extra["p95_ms"]) == ("spread", 0.0)
    assert (run.aims[0].value, run.aims[0].met) == (0.8, True)
    assert "104 ms expected, 100 ms taken" in ours.notes


@pytest.mark.parametrize(("expected", "met", "said"), [(0.0, True, False), (0.95, True, True), (1.5, False, True)])
def test_that_a_constant_is_as_good_is_judged_and_said(expected: float, met: bool, said: bool) -> None:
    """Starts take 90 or 110 ms by turns, so the constant is 10 ms off; ours ``expected`` times as much."""
    run = Run(quick=False)
    took = [90.0 if number % 2 else 110.0 for number in range(LEAST)]
    tell(run, "ssd", [Start("f", "ssd", each + 10.0 * expected, each) for each in took], SSD)
    aim = run.aims[1]
    assert (aim.aim, aim.met) == ("ssd: p95 of error / the constant's", met)
    assert ("a constant is as good here" in run.cases[0].notes) is said


def test_the_spread_of_equal_starts_stands_beside_the_errors_stage_by_stage() -> None:
    run = Run(quick=True)
    small = [Start("m32", "ssd", 0.0, 100.0 + off, {"sandbox": 5.0, "weights": 90.0 + off}) for off in (0.0, 2.0, 8.0)]
    large = [Start(f"m64-{n}", "ssd", 0.0, 200.0, {"sandbox": 5.0, "weights": 190.0}) for n in range(3)]
    tell(run, "ssd", [*small, *large], SSD)
    spread = run.case("ssd", "spread")
    assert spread.samples == [2.0, 0.0, 6.0, 0.0, 0.0, 0.0], "from the median of their size"
    assert (spread.extra["sandbox_p95_ms"], spread.extra["weights_p95_ms"]) == (0.0, 6.0)


def test_the_constant_knows_its_function() -> None:
    """Else the sizes of models would be its error."""
    run = Run(quick=True)
    tell(run, "ssd", [Start(f"m{64 * (n % 2 + 1)}", "ssd", 0.0, 100.0 * (n % 2 + 1)) for n in range(6)], SSD)
    assert run.case("ssd", "constant").samples == [0.0] * 4, "of the first of each it knows nothing"


def test_few_starts_judge_nothing() -> None:
    run = Run(quick=True)
    tell(run, "ssd", [Start("f", "ssd", 10.0, 20.0)] * 10, SSD)
    assert [aim.met for aim in run.aims] == [None, None]


def test_a_start_as_expected_is_off_in_no_term() -> None:
    assert all(taken == expected for expected, taken in from_ssd(105.0).by_term.values())


def test_the_cause_is_the_term_that_was_furthest_from_what_was_expected_of_it() -> None:
    assert cause(from_ssd(205.0, weights=200.0)) == "; furthest off was q + n/b: 100 ms expected (20 + 80), 200 taken"
    assert cause(from_ssd(225.0, sandbox=215.0)).startswith("; furthest off was sandbox: 5 ms expected, 215")
    assert cause(from_ssd(155.0)) == "; furthest off was rest: 3 ms expected, 53 taken"
    assert cause(Start("f", "ssd", 1.0, 2.0)) == "", "nothing is known of its terms"


def test_of_weights_in_memory_nothing_was_to_be_read() -> None:
    terms = {**TERMS, "queue": 0.0, "read": 0.0, "rest": 20.0}
    start = Start("f", "dram", 32.0, 132.0, {**STAGES, "weights": 118.0}, terms)
    assert "q + n/b" not in start.by_term
    assert start.by_term["rest"] == (20.0, 120.0)


def test_the_worst_start_is_named_with_its_cause() -> None:
    run = Run(quick=True)
    tell(run, "ssd", [from_ssd(106.0)] * 4 + [from_ssd(195.0, weights=190.0)], SSD)
    notes = run.cases[0].notes
    assert "105 ms expected, 195 ms taken; furthest off was q + n/b: 100 ms expected (20 + 80), 190 taken" in notes
    assert run.cases[0].extra["q + n/b_off_p95_ms"] == 90.0
