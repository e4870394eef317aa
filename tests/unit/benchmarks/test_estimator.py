"""The sums of ``benchmarks.estimator``, and one start of it."""

from __future__ import annotations

from benchmarks.estimator import Start, tell
from benchmarks.runner import Run


def test_errors_are_summed_and_judged() -> None:
    run = Run(quick=False)
    starts = [Start("f", "dram", expected=100.0 + number % 5, took=100.0) for number in range(200)]
    tell(run, "dram", starts)
    ours, constant, spread = run.cases
    assert (len(ours.samples), len(constant.samples)) == (200, 199)
    assert ours.extra["p95_ms"] == 4.0
    assert constant.extra["p95_ms"] == 0.0
    assert (spread.system, spread.extra["p95_ms"]) == ("spread", 0.0)
    (aim,) = run.aims
    assert (aim.value, aim.met) == (0.8, True)
    assert "104 ms expected, 100 ms taken" in ours.notes


def test_the_spread_of_equal_starts_stands_beside_the_errors_stage_by_stage() -> None:
    run = Run(quick=True)
    small = [Start("m32", "ssd", 0.0, 100.0 + off, {"sandbox": 5.0, "weights": 90.0 + off}) for off in (0.0, 2.0, 8.0)]
    large = [Start(f"m64-{n}", "ssd", 0.0, 200.0, {"sandbox": 5.0, "weights": 190.0}) for n in range(3)]
    tell(run, "ssd", [*small, *large])
    spread = run.case("ssd", "spread")
    assert spread.samples == [2.0, 0.0, 6.0, 0.0, 0.0, 0.0], "from the median of their size"
    assert (spread.extra["sandbox_p95_ms"], spread.extra["weights_p95_ms"]) == (0.0, 6.0)


def test_few_starts_judge_nothing() -> None:
    run = Run(quick=True)
    tell(run, "ssd", [Start("f", "ssd", 10.0, 20.0)] * 10)
    assert run.aims[0].met is None


def test_the_worst_start_is_named_with_its_cause() -> None:
    run = Run(quick=True)
    usual = [Start("f", "dram", 100.0, 101.0, {"sandbox": 10.0, "weights": 20.0})] * 4
    tell(run, "dram", [*usual, Start("f", "dram", 100.0, 190.0, {"sandbox": 12.0, "weights": 110.0})])
    assert "190 ms taken; weights took 110 ms, as a rule 20" in run.cases[0].notes
