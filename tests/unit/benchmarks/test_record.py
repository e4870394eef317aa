"""Records, aims, the command line and the report."""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import machine, report
from benchmarks.programs import ProgramFailed, Usage, own_usage
from benchmarks.record import TAIL, Aim, Case, against_limit, none_of, percentile, ratio, tail
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


def test_an_error_that_nobody_foresaw_ends_its_case_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measure(run: Run, cases: Sequence[str]) -> None:
        with run.attempt("one"):
            raise RuntimeError("CUDA out of memory")
        run.case("two", "sllm").samples.append(1.0)
        raise KeyError("leader")

    file = tmp_path / "made.json"
    assert main("made", ("one", "two"), measure, ["--json", str(file)]) == 1
    record = json.loads(file.read_text())
    said = {case["case"]: case.get("not_run") for case in record["cases"]}
    assert said == {
        "one": "failed: RuntimeError: CUDA out of memory",
        "two": None,
        "made": "failed: KeyError: 'leader'",
    }
    assert [aim["aim"] for aim in record["aims"]] == ["one: errors that ended it", "made: errors that ended it"]
    assert "Traceback" in capsys.readouterr().err


def test_what_was_measured_before_an_interruption_is_recorded(tmp_path: Path) -> None:
    def measure(run: Run, cases: Sequence[str]) -> None:
        with run.attempt("one"):
            run.case("one", "sllm").samples.append(1.0)
            os.kill(os.getpid(), signal.SIGTERM)

    file = tmp_path / "made.json"
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert main("made", ("one", "two"), measure, ["--json", str(file)]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    record = json.loads(file.read_text())
    assert record["settings"]["interrupted"] is True
    assert [case["samples"] for case in record["cases"]] == [[1.0]]


def test_a_sample_is_taken_with_what_it_cost() -> None:
    case = Case("c", "sllm", "s")
    for cpu_s, mib in ((1.0, 30.0), (2.0, 20.0), (3.0, 10.0)):
        case.take(7.0, cpu_s, mib)
    assert (case.samples, case.cpu_s, case.peak_rss_mib) == ([7.0] * 3, 2.0, 30.0)
    other = Case("c", "peer", "s")
    other.take(1.0)
    assert (other.cpu_s, other.peak_rss_mib) == (None, None)


@pytest.mark.parametrize(("ours", "met"), [(1.0, True), (1.06, False), (0.85, False)])
def test_a_limit_that_is_beaten_is_none(ours: float, met: bool) -> None:
    limits = [Case("c", name, "s", [seconds] * 7) for name, seconds in (("slow", 2.0), ("fast", 1.0))]
    aim = against_limit(
        "c", [*limits, Case("c", "not here", "s")], Case("c", "sllm", "s", [ours] * 7), at_least=0.95, least=7
    )
    assert (aim.aim, aim.met, aim.bound) == ("c: fast / sllm", met, "≥ 0.95, ≤ 1.1")


@pytest.mark.parametrize(
    ("count", "of", "met"), [(0, 0, None), (0, 6, None), (0, 7, True), (1, 1, False), (1, 9, False)]
)
def test_that_nothing_happened_is_met_by_enough_and_missed_by_one(count: int, of: int, met: bool | None) -> None:
    assert none_of("lost", count, of=of, least=7).met is met


def test_of_few_samples_the_tail_is_the_worst() -> None:
    samples = [float(number) for number in range(1, TAIL + 1)]
    assert (tail(samples), tail(samples[:-1]), tail([])) == ({"p99": 99.0}, {"max": 99.0}, {})


def test_the_page_marks_what_is_not_to_be_relied_on_and_keeps_misses(tmp_path: Path) -> None:
    file = tmp_path / "made.json"
    assert main("made", ("one",), measured, ["--json", str(file), "--quick"]) == 0
    record = json.loads(file.read_text())
    aims = [Aim("copies: fio / sllm", value, at_least=0.95).document() for value in (2.3, 0.5, None)]
    aims.append(Aim("sata: share", 1.0, at_least=0.95, at_most=1.1).document())
    record |= {"benchmark": "load", "commit": "1234567+", "started": "2026-11-22T00:00:00+00:00", "aims": aims}
    record["settings"]["interrupted"] = True
    page = report.render([("machine", record | {"age": {"commits": 40, "changes": 3}})])
    for mark in (
        "A quick run",
        "It was interrupted",
        "not committed",
        "Old: its benchmark was changed in 3 of the 40 commits since.",
    ):
        assert mark in page
    why = "fio read into small pages"
    assert f"| copies: fio / sllm | ≥ 0.95 | 2.3 | withdrawn: {why} |" in page
    assert f"| copies: fio / sllm | ≥ 0.95 | 0.5 | **no**: {why} |" in page
    assert f"| copies: fio / sllm | ≥ 0.95 | - | not judged: {why} |" in page
    assert "| sata: share | ≥ 0.95, ≤ 1.1 |" in page
    title = "[load on machine: made_large.json](#load-on-machine-made_largejson)"
    page = report.render([("machine", record | {"age": {"commits": 40, "changes": 3}, "file": "made_large.json"})])
    missed = "copies: fio / sllm: **0.5** (≥ 0.95)"
    assert f"| {title} | 2026-11-22 | quick, interrupted, not committed, old | 0 | 3 | {missed} |" in page
    record |= {"commit": "1234567", "started": "2027-01-01T00:00:00+00:00", "settings": {}}
    page = report.render([("machine", record | {"age": {"commits": 40, "changes": 0}})])
    assert "| copies: fio / sllm | ≥ 0.95 | 2.3 | yes |" in page
    assert "**A quick" not in page
    assert "Old:" not in page
    assert f"| 2027-01-01 |  | 2 | 1 | {missed} |" in page


def test_a_record_is_as_old_as_what_has_changed_its_benchmark(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        said = subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            cwd=tmp_path, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return said.stdout.strip()

    git("init", "-q")
    commits = []
    for name in ("made.py", "made_part.py", "maderight.py", "heard.py"):
        (tmp_path / "benchmarks").mkdir(exist_ok=True)
        (tmp_path / "benchmarks" / name).touch()
        git("add", ".")
        git("commit", "-qm", name)
        commits.append(git("rev-parse", "--short", "HEAD"))
    assert report.age({"benchmark": "made", "commit": f"{commits[0]}+"}, tmp_path) == {
        "age": {"commits": 3, "changes": 1}
    }
    assert report.age({"benchmark": "made", "commit": commits[1]}, tmp_path) == {"age": {"commits": 2, "changes": 0}}
    assert report.age({"benchmark": "made", "commit": "0123456"}, tmp_path) == {}


def test_without_a_limit_nothing_is_judged() -> None:
    assert against_limit("c", [], Case("c", "sllm", "s", [1.0] * 7), at_least=0.95, least=7).met is None


def test_list_names_the_cases_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("made", ("one", "two"), measured, ["--list"]) == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_figures_have_four_digits_and_no_powers_of_ten() -> None:
    assert [figure(value) for value in (None, 0.12345, 123.456, 71234.5)] == ["-", "0.1235", "123.5", "71,234"]


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


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("failover", "chaos_client.py"),  # reads its streams
        ("failover", "chaos_faults.py"),
        ("failover", "nats_cluster.py"),
        ("chaos", "nats_cluster.py"),
        ("estimator", "throttle.py"),
        ("replay", "beginning.py"),
        ("migration", "slow_store.py"),
    ],
)
def test_a_record_is_old_when_a_module_that_measures_for_it_has_changed(tmp_path: Path, name: str, file: str) -> None:
    def git(*words: str) -> str:
        who = ("-c", "user.name=t", "-c", "user.email=t@localhost")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, capture_output=True, text=True, check=True).stdout

    (tmp_path / "benchmarks").mkdir()
    git("init", "-q")
    for number in range(2):
        (tmp_path / "benchmarks" / file).write_text(f"{number}\n")
        git("add", ".")
        git("commit", "-q", "-m", f"{number}")
    made = git("rev-parse", "HEAD^").strip()
    assert report.age({"benchmark": name, "commit": made}, tmp_path) == {"age": {"commits": 1, "changes": 1}}
