"""What the benchmark of migrations calls lost, repeated, different, and a pause."""

from __future__ import annotations

import os
import random
import shlex
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import migration_large
from benchmarks.heard import Heard, Piece, Sums, Window, jitters, longest, moves, pauses, understand, untouched
from benchmarks.migration import ABANDONED, LEAST, Counts, Fate, _case, judge, measure_gaps, tell
from benchmarks.migration_load import CALLERS, Called, Load, heard_since, set_apart
from benchmarks.platform import Platform
from benchmarks.programs import Program, ProgramFailed, Usage
from benchmarks.record import Case
from benchmarks.runner import Run
from sllm_gateway import sse
from sllm_gateway.pace import MOST


def test_what_was_lost_repeated_or_different() -> None:
    sums = Sums()
    sums.add(Heard(0, ids=[0, 1, 2], values=["a", "b", "c"]), ["a", "b", "c"])
    assert (sums.lost, sums.repeated, sums.different) == (0, 0, 0)
    sums.add(Heard(0, ids=[0, 0, 2, 3], values=["a", "a", "x", "d"]), ["a", "b", "c"])
    assert (sums.streams, sums.events) == (2, 7)
    assert (sums.lost, sums.repeated, sums.different) == (1, 1, 2)


def test_tokens_in_another_order_are_different() -> None:
    """Each is there, once, and is the right one for its id: its caller reads another text all the same."""
    sums = Sums()
    sums.add(Heard(0, ids=[0, 2, 1], values=["a", "c", "b"]), ["a", "b", "c"])
    assert (sums.lost, sums.repeated) == (0, 0)
    assert sums.wrong > 0


def test_the_longest_gap_from_a_command_is_one_of_calls_that_were_there() -> None:
    """Calls that began while an instance moved were not moved: that they had no gap says nothing of those that were."""
    moved = Heard(0, times=[0.0, 1.0, 2.0, 6.0, 7.0, 8.0, 9.0], moves=[3.0])
    later = Heard(0, times=[4.5, 5.5, 6.5, 7.5])
    load: Any = SimpleNamespace(heard=[moved, later], sums=lambda: Sums(streams=2), at_once=True)
    run = Run(quick=True)
    fate = Fate(cast(Called, None), lambda: None, lambda _: True, Counts(migrations=1, calls=1))
    tell(run, "move", load, [Window(2.5, 5.0)], fate)
    case = run.case("move", "sllm", "intervals")
    assert case.extra["own_n"] == case.extra["calls_moved"] == 1
    assert case.extra["own_p50"] == pytest.approx(4.0 / 1.5, abs=0.01)


def test_a_pause_is_counted_in_intervals_of_calls_that_nothing_befell_and_in_the_calls_own() -> None:
    """What a call's own gaps do to its intervals hides half of them."""
    quiet = Heard(0, times=[float(at) for at in range(11)])
    moved = Heard(0, times=[20.0, 21.0, 27.0, 28.0])
    windows = [Window(22.0, 24.0)]
    assert untouched([quiet, moved, Heard(0), Heard(0, times=[0.0, 1.0], error="gone")], windows) == [quiet]
    case = Case("move", "sllm", "intervals")
    measure_gaps(case, [quiet, moved], quiet.usual, lambda heard: longest(heard, windows))
    assert (case.samples, case.extra["own_p50"]) == ([6.0], 2.25)
    assert (case.extra["interval_ms"], case.extra["own_interval_ms"]) == (1000.0, 2666.67)
    none = Case("move", "sllm", "intervals")
    measure_gaps(none, [moved], None, lambda heard: longest(heard, windows))
    assert (none.samples, none.extra["own_n"]) == ([], 1)


def test_that_a_call_waits_is_nothing_that_its_caller_hears() -> None:
    """Else the next instance is killed before it has made a value, again and again."""
    waits = Piece(2.0, sse.event(b"{}", name="progress") + sse.HEARTBEAT)
    value = Piece(3.0, sse.event(b'"a"', id=7))
    assert not heard_since(Heard(0, arrived=[value._replace(at=1.0), waits]), 1.5)
    assert heard_since(Heard(0, arrived=[value, waits._replace(at=4.0)]), 1.5)
    assert not heard_since(Heard(0, arrived=[value]), 3.0)


def test_a_pause_is_the_longest_gap_in_its_time() -> None:
    times = [0.0, 1.0, 1.0, 2.0, 6.0, 7.0, 7.0, 8.0, 8.0]
    heard = Heard(0, times=times)
    assert longest(heard, [Window(4.0, 5.0)]) == [4.0]
    assert longest(heard, [Window(20.0, 21.0)]) == []
    assert longest(heard, [Window(7.5, 30.0)]) == []
    assert longest(Heard(0), [Window(0.0, 1.0)]) == []
    assert longest(Heard(0, times=[2.0, 2.0]), [Window(1.0, 1.5)]) == [], "broken off: nothing is known of its interval"
    assert pauses(Heard(0, times=[2.0, 2.0], moves=[1.0])) == []


def test_a_pause_is_the_gap_in_which_the_call_went_over() -> None:
    later = [float(at) for at in range(19, 30)]
    heard = Heard(0, times=[10.0, 11.0, 12.0, 15.0, 16.0, 17.0, 18.0, 18.0, 18.0, *later])
    heard.moves = moves(
        heard, "timeline queue=1.0@0.0 first_token=2.0@0.0 tokens=8000.0@2.0 move=0.0@3502.0 move=0.0@6602.0"
    )
    assert heard.moves == [13.5, 16.6]
    assert pauses(heard) == [3.0, 1.0]
    assert pauses(Heard(0, moves=[1.0])) == []


def test_a_pause_that_the_reserve_put_off_is_found() -> None:
    """What was in reserve when the call went over is written first."""
    seam, end = float(MOST), float(MOST + 2)
    heard = Heard(
        0, times=[-2.0, -1.0, *(float(at) for at in range(MOST + 1)), end, end, *(end + at for at in range(1, 9))]
    )
    assert heard.usual == 1.0
    heard.moves = [0.0]
    assert heard.times[heard.times.index(seam) + 1] - seam == 2.0
    assert pauses(heard) == [2.0]


def test_a_jitter_is_the_gap_at_a_moment_of_each_window_that_a_stream_ran_through() -> None:
    heard = Heard(0, times=[0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.0, *(float(at) for at in range(9, 20))])
    quiet, gap = Window(6.9, 7.1), Window(3.0, 4.0)
    assert jitters(heard, [quiet, gap, Window(20.0, 21.0)], random.Random(1)) == [1.0, 3.0]
    assert jitters(Heard(0), [quiet], random.Random(1)) == []


def _piece(at: float, *ids: int, end: str = "", anew: bool = False) -> Piece:
    events = "".join(f'id: {number}\ndata: "t{number}"\n\n' for number in ids)
    return Piece(at, (events + end).encode(), anew)


def test_a_stream_that_breaks_off_is_counted_with_what_it_did_not_say() -> None:
    right = ["t0", "t1", "t2"]
    error = Heard(0, arrived=[_piece(1.0, 0, 1), _piece(2.0, end="event: error\ndata: lost\n\n")])
    cut = Heard(0, arrived=[_piece(1.0, 0, 1, 2)])
    whole = Heard(0, arrived=[_piece(1.0, 0, 1, 2, end="data: [DONE]\n\n")])
    refused = Heard(0, error="it answers 503")
    sums = Sums()
    for heard in (error, cut, whole, refused):
        understand(heard)
        sums.add(heard, right)
    assert (sums.streams, sums.broken, sums.lost) == (4, 3, 1 + 3)
    assert (error.error, refused.error, whole.error) == ("lost", "it answers 503", "")
    assert cut.error == "the stream ended without its end"


def test_of_a_call_that_was_made_anew_the_pause_lasts_until_there_is_news() -> None:
    broken = "event: error\ndata: lost\n\n"
    heard = Heard(0, arrived=[_piece(1.0, 0), _piece(2.0, 1, end=broken), _piece(5.0, 0, anew=True)])
    heard.arrived += [_piece(6.0, 1), _piece(7.0, 2), _piece(8.0, 3, end="data: [DONE]\n\n")]
    understand(heard)
    assert (heard.ids, heard.values, heard.error) == ([0, 1, 2, 3], ["t0", "t1", "t2", "t3"], "")
    assert (heard.anew, heard.usual) == ([2], 1.0), "the gap itself is no interval of the call"
    assert longest(heard, [Window(2.5, 4.0)]) == [5.0]


def test_a_migration_is_one_that_took_calls_along_and_its_calls_are_counted_apart() -> None:
    counts = Counts()
    for calls in (3, 0, 2):
        counts.add(True, calls)
    assert (counts.migrations, counts.calls, counts.abandoned) == (2, 5, 0)
    counts.abandoned = ABANDONED - 1
    with pytest.raises(ProgramFailed, match="abandoned"):
        counts.add(False, 0)


def test_a_broken_stream_and_too_few_migrations_make_aims_false() -> None:
    run = Run(quick=True)
    pause = Case("move_pause", "sllm", "intervals", samples=[1.0] * (LEAST - 1), extra={"p99": 1.0})
    pause.extra |= {"own_n": LEAST, "own_p50": 1.0, "own_p99": 3.0}
    case = Case("move", "sllm", "intervals", samples=[3.0] * LEAST, extra={"p99": 4.0, "times": 7})
    judge(run, case, pause, Sums(streams=9, broken=1, lost=7), Counts(migrations=99, calls=300), wanted=100)
    found = {aim.aim: aim.met for aim in run.aims}
    undisturbed, own = "intervals of calls that nothing befell", "intervals of the moved call"
    assert found[f"move: pause p50, {undisturbed}"] is True
    assert found[f"move: pause p99, {undisturbed}"] is None
    assert found[f"move: pause p50, {own}"] is True
    assert found[f"move: pause p99, {own}"] is False
    assert found[f"move: longest gap from the command on p50, {undisturbed}"] is False
    assert found[f"move: longest gap from the command on p99, {undisturbed}"] is False
    assert found[f"move: longest gap from the command on p50, {own}"] is None
    met = {aim.aim.partition(",")[0]: aim.met for aim in run.aims}
    assert met["move: streams broken off"] is False
    assert met["move: tokens lost"] is False
    assert met["move: tokens repeated"] is True
    assert met["move: migrations"] is False
    assert (case.extra["migrations"], case.extra["calls_moved"]) == (99, 300)


def test_a_case_that_nothing_befell_proves_nothing() -> None:
    for streams, times in ((0, 9), (9, 6)):
        run, case = Run(quick=True), Case("still", "sllm", "intervals", extra={"times": times})
        judge(run, case, Case("still_pause", "sllm", "intervals"), Sums(streams=streams), None, wanted=0)
        assert {aim.met for aim in run.aims} == {None}


class Gone:
    """A platform that nobody reaches any more."""

    token = "t"

    def __init__(self) -> None:
        self.connected = threading.Event()

    @property
    def program(self) -> Gone:
        return self

    def usage(self) -> Usage:
        return Usage(0.0, 0.0)

    def connect(self) -> None:
        self.connected.set()
        raise ConnectionRefusedError("gone")


def test_a_case_that_breaks_is_judged_by_what_its_callers_heard_until_then() -> None:
    run, gone = Run(quick=True), Gone()
    called = Called(cast(Platform, gone), "f", [{}])

    def enough(_: Counts) -> bool:
        assert gone.connected.is_set(), "each has called before anything befalls them"
        raise ProgramFailed("the platform has ended")

    with run.attempt("move", "intervals"):
        _case(run, "move", Fate.moving(called, enough, wanted=100), [["t0", "t1"]])
    met = {aim.aim.partition(",")[0]: aim.met for aim in run.aims}
    assert met["move: streams broken off"] is False
    assert met["move: tokens lost"] is False
    assert met["move: migrations"] is False
    assert met["move: errors that ended it"] is False
    assert "ConnectionRefusedError: gone" in run.cases[0].notes


def test_what_was_heard_before_a_case_broke_is_understood() -> None:
    load = Load(Called(cast(Platform, Gone()), "f", [{}]), [["t0", "t1"]])

    def breaks() -> None:
        load.until_all_make_a_whole_call()
        load.heard.append(Heard(0, arrived=[_piece(1.0, 0, 1, end="data: [DONE]\n\n")]))
        raise ProgramFailed("the platform has ended")

    with pytest.raises(ProgramFailed), load.running():
        breaks()
    whole = [heard for heard in load.heard if not heard.error]
    assert [heard.values for heard in whole] == [["t0", "t1"]]
    assert len(load.heard) > CALLERS


def test_calls_whose_answers_hold_half_characters_back_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their events are late by themselves; with too few others it is told."""
    asks = [{"max_tokens": 3, "seed": seed} for seed in range(6)]
    answers = [["a", "b", "c"]] * 6
    monkeypatch.setattr(Called, "right", lambda self: answers)
    called = Called(cast(Platform, None), "f", asks)
    assert migration_large.telling(called).asks == asks
    answers[2] = ["a", "\N{SNOWMAN}"]
    assert [ask["seed"] for ask in migration_large.telling(called).asks] == [0, 1, 3, 4, 5]
    answers[:3] = [["a"]] * 3
    with pytest.raises(ProgramFailed, match="of 6 answers 3 have an event for each token"):
        migration_large.telling(called)


def test_what_a_cluster_has_on_machines_of_its_own_waits_for_no_core(tmp_path: Path) -> None:
    titles = ("sllm-gateway", "/bin/nats-server", "sllm-worker")
    # In one write each: three share the pipe, and an unbuffered ``print`` writes its end apart.
    says = shlex.quote(r"import os, time; os.write(1, b'{}\n'); time.sleep(60)")
    children = "".join(f"(exec -a {title} {shlex.quote(sys.executable)} -c {says}) & " for title in titles)
    with Program(["bash", "-c", f"{children} wait"], tmp_path / "log") as program:
        for _ in titles:
            program.hear(20.0)
        allowed = set_apart(cast(Platform, SimpleNamespace(program=program)))
        policies = {process.cmdline()[0]: os.sched_getscheduler(process.pid) for process in program.tree()}
    apart = os.SCHED_RR if allowed else os.SCHED_OTHER
    assert policies["sllm-gateway"] == policies["/bin/nats-server"] == apart
    assert policies["sllm-worker"] == os.SCHED_OTHER


def test_where_nothing_can_be_set_apart_the_case_ends(tmp_path: Path) -> None:
    with Program(["sleep", "60"], tmp_path / "log") as program, pytest.raises(ProgramFailed, match="sllm-gateway"):
        set_apart(cast(Platform, SimpleNamespace(program=program)))
