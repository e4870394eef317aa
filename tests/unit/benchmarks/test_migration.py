"""What the benchmark of migrations calls lost, repeated, different, and a pause."""

from __future__ import annotations

import random

from benchmarks.heard import Heard, Sums, Window, jitters, longest, moves, pauses


def test_what_was_lost_repeated_or_different() -> None:
    sums = Sums()
    sums.add(Heard(0, ids=[0, 1, 2], values=["a", "b", "c"]), ["a", "b", "c"])
    assert (sums.lost, sums.repeated, sums.different) == (0, 0, 0)
    sums.add(Heard(0, ids=[0, 0, 2, 3], values=["a", "a", "x", "d"]), ["a", "b", "c"])
    assert (sums.streams, sums.events) == (2, 7)
    assert (sums.lost, sums.repeated, sums.different) == (1, 1, 2)


def test_a_pause_is_counted_in_the_streams_own_intervals() -> None:
    times = [0.0, 1.0, 1.0, 2.0, 6.0, 7.0, 7.0, 8.0, 8.0]
    heard = Heard(0, times=times)
    assert longest(heard, [Window(4.0, 5.0)]) == [4.0]
    assert longest(heard, [Window(20.0, 21.0)]) == []
    assert longest(heard, [Window(7.5, 30.0)]) == []
    assert longest(Heard(0), [Window(0.0, 1.0)]) == []


def test_a_pause_is_the_gap_in_which_the_call_went_over() -> None:
    heard = Heard(0, times=[10.0, 11.0, 12.0, 15.0, 16.0, 17.0, 18.0, 18.0, 18.0])
    heard.moves = moves(
        heard, "timeline queue=1.0@0.0 first_token=2.0@0.0 tokens=8000.0@2.0 move=0.0@3502.0 move=0.0@6602.0"
    )
    assert heard.moves == [13.5, 16.6]
    assert pauses(heard) == [3.0, 1.0]
    assert pauses(Heard(0, moves=[1.0])) == []


def test_a_jitter_is_the_gap_at_a_moment_of_each_window_that_a_stream_ran_through() -> None:
    heard = Heard(0, times=[0.0, 1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 9.0, 9.0, 9.0])
    quiet, gap = Window(6.9, 7.1), Window(3.0, 4.0)
    assert jitters(heard, [quiet, gap, Window(20.0, 21.0)], random.Random(1)) == [1.0, 3.0]
    assert jitters(Heard(0), [quiet], random.Random(1)) == []
