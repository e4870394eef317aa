"""Records, aims, the command line and the report."""

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine, report
from benchmarks.gateway import note
from benchmarks.generator import Load, Outcome
from benchmarks.programs import ProgramFailed, Usage, own_usage
from benchmarks.record import Aim, Case, percentile, ratio
from benchmarks.runner import Run, figure, main


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.floats(0, 100))
def test_a_percentile_is_a_sample_with_so_many_not_above_it(samples: list[float], percent: float) -> None:
    found = percentile(samples, percent)

    assert found in samples
    assert sum(sample <= found for sample in samples) >= len(samples) * percent / 100 - 1e-6


def test_percentiles_of_a_hundred() -> None:
    samples = [float(number) for number in range(1, 101)]
    assert (percentile(samples, 99), percentile(samples, 50), percentile(samples, 100)) == (99, 50, 100)


def test_a_ratio_needs_enough_samples_on_both_sides() -> None:
    few, many = Case("c", "a", "ms", [2.0] * 3), Case("c", "b", "ms", [4.0] * 7)
    assert ratio(few, many, least=7) is None
    assert ratio(few, many, least=3) == 0.5
    assert ratio(None, many, least=1) is None


@pytest.mark.parametrize(
    ("aim", "met"),
    [
        (Aim("a", 1.0, at_least=1.0), True),
        (Aim("a", 0.9, at_least=1.0), False),
        (Aim("a", 2.1, at_most=2.0), False),
        (Aim("a", None, at_most=2.0), None),
    ],
)
def test_an_aim_is_met_missed_or_not_judged(aim: Aim, met: bool | None) -> None:
    assert aim.met is met
    assert aim.document()["met"] is met


def measured(run: Run, cases: Sequence[str]) -> None:
    for name in cases:
        run.case(name, "sllm").samples += [1.0] * run.rounds
    run.case("one", "peer | other").not_run = "no\nway"
    run.aims.append(Aim("one: sllm", 1.0, at_most=0.5))


def test_the_command_line_writes_a_record_that_the_report_shows(tmp_path: Path) -> None:
    file = tmp_path / "results" / "machine" / "made.json"
    assert main("made", ("one", "two"), measured, ["--json", str(file), "--quick", "--only", "one"]) == 0
    record = json.loads(file.read_text())

    assert [case["case"] for case in record["cases"]] == ["one", "one"]
    assert record["cases"][0]["samples"] == [1.0] * 3
    before, after = record["settings"].pop("yardstick_ms")
    assert before > 0 < after
    assert record["settings"] == {"quick": True}
    assert set(record["machine"]["disk"]) == {"device", "direct_read_gb_s"}
    file.with_suffix(".md").write_text("Missed, since the disk is slow.\n")
    record["settings"]["yardstick_ms"] = [30.1, 42.0]
    page = report.render([("machine", record | report.remarks(file))])
    assert "\n## made on machine\n" in page
    other = report.remarks(file.with_name("made_large.json"))
    assert "\n## made on machine: made_large.json\n" in report.render([("machine", record | other)])
    assert "yardstick 30.1 ms before, 42.0 ms after" in page
    assert page.endswith("\n\nMissed, since the disk is slow.\n")
    assert "| one | sllm | 1 | 1 | 1 | 3 | ms |" in page
    assert "| one: sllm | ≤ 0.5 | 1 | **no** |" in page
    assert "no way" in page


def test_a_record_is_of_the_checkout_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that changed meanwhile is marked."""
    there = ["1234567"]
    monkeypatch.setattr(machine, "commit", lambda: there[0])

    def changed(run: Run, cases: Sequence[str]) -> None:
        there[0] = "1234567+"
        measured(run, cases)

    file = tmp_path / "made.json"
    assert main("made", ("one",), changed, ["--json", str(file), "--quick"]) == 0
    record = json.loads(file.read_text())
    assert (record["commit"], record["settings"]["commit_after"]) == ("1234567", "1234567+")
    assert "HAS CHANGED MEANWHILE, to 1234567+." in report.render([("machine", record)])


def test_a_disk_is_read_past_its_cache_or_says_nothing(tmp_path: Path) -> None:
    found = machine.disk(tmp_path)
    assert found["direct_read_gb_s"] is None or found["direct_read_gb_s"] > 0
    assert found["device"]
    assert not list(tmp_path.iterdir())


def test_a_case_that_breaks_ends_no_other(tmp_path: Path) -> None:
    def measure(run: Run, cases: Sequence[str]) -> None:
        for name in cases:
            with run.attempt(name):
                if name == "one":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                run.case(name, "sllm").samples.append(1.0)

    file = tmp_path / "made.json"
    assert main("made", ("one", "two"), measure, ["--json", str(file)]) == 1
    record = json.loads(file.read_text())
    one, two = record["cases"]
    assert [(aim["aim"], aim["met"]) for aim in record["aims"]] == [("one: errors that ended it", False)]
    assert "No space left" in one["not_run"]
    assert two["samples"] == [1.0]


def test_list_names_the_cases_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("made", ("one", "two"), measured, ["--list"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_figures_have_four_digits_and_no_powers_of_ten() -> None:
    assert [figure(value) for value in (None, 0.12345, 123.456, 71234.5)] == ["-", "0.1235", "123.5", "71,234"]


LOAD = Load(1, "/", {}, "", 2, 10, 0.0)


def test_an_outcome_with_wrong_tokens_is_an_error() -> None:
    with pytest.raises(ProgramFailed, match="wrong tokens"):
        note(Case("c", "s", "ms"), LOAD, Outcome(wrong=1), Usage(0, 0))


def test_an_unfinished_load_counts_what_came_and_says_so() -> None:
    case = Case("c", "s", "tokens/s")
    outcome = Outcome(failed=1, tokens=30, seconds=2.0, ttft_ms=[1.0], errors=["broke off"])

    assert not note(case, LOAD, outcome, Usage(0.5, 10))
    assert case.samples == [15.0]
    assert "1 of 2 streams" in case.notes
    assert "broke off" in case.notes
    assert note(case, LOAD, Outcome(completed=2, tokens=20, seconds=1.0, ttft_ms=[3.0, 5.0]), Usage(1.5, 30))
    assert (case.cpu_s, case.peak_rss_mib, case.extra["ttft_p50_ms"]) == (1.0, 30, 2.5)


def test_a_case_that_breaks_is_recorded_and_the_others_are_measured(tmp_path: Path) -> None:
    def breaks(run: Run, cases: Sequence[str]) -> None:
        for name in cases:
            with run.attempt(name):
                if name == "one":
                    raise ProgramFailed("the stream ended")
                run.case(name, "sllm").samples.append(1.0)

    file = tmp_path / "made.json"
    assert main("made", ("one", "two"), breaks, ["--json", str(file)]) == 1
    cases = {case["case"]: case for case in json.loads(file.read_text())["cases"]}
    assert cases["one"]["not_run"] == "failed: the stream ended"
    assert cases["two"]["samples"] == [1.0]


def test_what_is_used_meanwhile_stands_beside_the_times() -> None:
    run = Run(quick=True)
    case, said = run.case("one", "sllm"), iter([Usage(1.0, 30), Usage(3.5, 20), Usage(3.0, 10), Usage(2.0, 40)])
    with run.spending(lambda: next(said), case):
        pass
    assert (case.cpu_s, case.peak_rss_mib) == (2.5, 30)
    with pytest.raises(ProgramFailed), run.spending(lambda: next(said), case):
        raise ProgramFailed
    assert (case.cpu_s, case.peak_rss_mib) == (2.5, 40), "what a lost process used is not taken back"
    used = own_usage()
    assert used.cpu_s > 0 < used.pss_mib
