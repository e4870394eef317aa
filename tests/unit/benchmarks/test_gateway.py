"""``benchmarks.gateway`` without its systems: what a load counts for, who stands still meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import cast

import pytest

from benchmarks.gateway import INTERVAL_S, MANY, Bench, most_kept, note, paced, unbroken
from benchmarks.generator import Load, Outcome
from benchmarks.programs import Program, ProgramFailed, Usage
from benchmarks.record import Case
from benchmarks.runner import Run
from benchmarks.streaming import SYSTEMS, Generator, System

LOAD = Load(1, "/", {}, "", 2, 10, 0.0)
KEPT = 300


class Standing:
    """A system's program."""

    def __init__(self) -> None:
        self.still = False

    def usage(self) -> Usage:
        return Usage(0.0, 0.0)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        self.still = True
        yield
        self.still = False


class Scripted:
    """Every load is carried out well, as far as ``KEPT`` streams; ``failing``: so many streams of ours are not."""

    def __init__(self, programs: list[Standing], failing: int = 0) -> None:
        self._programs, self._failing = programs, failing
        self.still: list[list[bool]] = []

    def run(self, system: System, load: Load) -> tuple[Outcome, Usage]:
        self.still.append([program.still for program in self._programs])
        failed = self._failing if system.name == "sllm" else 0
        delay = 15.0 if load.streams <= KEPT else 50.0
        if system.name == "sllm":
            delay *= 1.5
        done = load.streams - failed
        outcome = Outcome(completed=done, failed=failed, tokens=done * load.count, seconds=1.0, ttft_ms=[1.0] * done)
        outcome.delay_p99_ms, outcome.errors = delay, ["broke off"] * bool(failed)
        return outcome, Usage(0.1, 10.0)


def bench(failing: int = 0) -> tuple[Bench, Scripted]:
    programs = [Standing() for _ in SYSTEMS]
    systems = [
        System(name, cast(Program, program), 1, "/", {}) for name, program in zip(SYSTEMS, programs, strict=True)
    ]
    scripted = Scripted(programs, failing)
    return Bench(Run(quick=False), cast(Generator, scripted), systems, {}), scripted


def test_an_outcome_with_wrong_tokens_is_an_error() -> None:
    with pytest.raises(ProgramFailed, match="wrong tokens"):
        note(Case("c", "s", "ms"), LOAD, Outcome(wrong=1), Usage(0, 0))


def test_an_unfinished_load_is_no_sample_and_a_missed_aim() -> None:
    """The tokens that came until then, over the time until the last of them, would be as good a rate as any."""
    case = Case("c", "s", "tokens/s")
    outcome = Outcome(failed=1, tokens=30, seconds=2.0, ttft_ms=[1.0], errors=["broke off"])

    assert not note(case, LOAD, outcome, Usage(0.5, 10))
    assert case.samples == []
    assert "1 of 2 streams" in case.notes
    assert "broke off" in case.notes
    assert (unbroken(case, least=7).value, unbroken(case, least=7).met) == (1.0, False)
    assert note(case, LOAD, Outcome(completed=2, tokens=20, seconds=1.0, ttft_ms=[3.0, 5.0]), Usage(1.5, 30))
    assert case.samples == [20.0]
    assert (case.cpu_s, case.peak_rss_mib, case.extra["ttft_p50_ms"]) == (1.0, 30, 2.5)


def test_streams_of_ours_that_broke_off_miss_an_aim_and_judge_nothing_else() -> None:
    made, _ = bench(failing=10)
    paced(made, "200", 200)
    met = {aim.aim: aim.met for aim in made.run.aims}
    assert met["paced_200: streams of sllm that failed"] is False
    assert met["paced_200: sllm / bare, p99 token delay"] is None
    fine, _ = bench()
    paced(fine, "200", 200)
    assert {aim.aim: aim.met for aim in fine.run.aims}["paced_200: streams of sllm that failed"] is True


def test_the_most_streams_are_found_as_they_are_measured_while_all_peers_stand_still() -> None:
    made, scripted = bench()
    assert most_kept(made) == KEPT
    assert {tuple(still) for still in scripted.still} == {(False, False, True, True)}


def test_the_pace_is_judged_at_every_number_of_streams() -> None:
    made, _ = bench()
    for name, streams in (("200", 200), ("n", KEPT), (str(MANY), MANY)):
        paced(made, name, streams)
    values = {aim.aim: (aim.value, aim.met) for aim in made.run.aims if "delay" in aim.aim}
    ours = 15.0 * 1.5
    assert ours > INTERVAL_S * 1e3
    assert values == {
        "paced_200: sllm / bare, p99 token delay": (1.5, True),
        "paced_n: sllm / bare, p99 token delay": (1.5, True),
        "paced_n: sllm, p99 token delay, ms": (ours, False),
        "paced_1000: sllm / bare, p99 token delay": (1.5, True),
    }
