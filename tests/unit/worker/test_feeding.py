"""Ids that a call had elsewhere come into the one that runs here."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import pytest

from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.protocol.limits import MOST_GENERATIONS, MOST_IDS
from sllm_runtime.worker.engine import loop as engine_loop
from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.scripted import ScriptedEngine
from sllm_runtime.worker.engine.sinks import Piece, ThreadSink
from sllm_runtime.worker.fed import Fed, Take
from tests.fixtures.waiting import GIVE_UP_S


class Held:
    """The engine that counts, but for the fourth id it waits until it is let go."""

    def __init__(self) -> None:
        self.waits, self.go = threading.Event(), threading.Event()
        self.drawn: list[int] = []

    def __call__(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        if len(output) == 3:
            self.waits.set()
            self.go.wait(GIVE_UP_S)
        self.drawn.append((output or prompt)[-1] + 1)
        return self.drawn[-1]

    def decode(self, numbers: Sequence[int]) -> str:
        return "".join(f"{number} " for number in numbers)


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def loop(held: Held) -> Iterator[EngineLoop]:
    made = EngineLoop(ScriptedEngine(held), held)
    made.start()
    yield made
    held.go.set()
    made.close()


def begun(loop: EngineLoop, held: Held, **sampling: object) -> tuple[int, ThreadSink]:
    """A request whose fourth id is being drawn: what it is told now comes after that."""
    sink = ThreadSink()
    number = loop.submit(Request(id=-1, prompt=(10,), sampling=Sampling(**{"max_tokens": 12, **sampling})), sink)  # type: ignore[arg-type]
    assert held.waits.wait(GIVE_UP_S)
    return number, sink


def said(sink: ThreadSink) -> list[Piece]:
    return list(sink)


@pytest.mark.parametrize("upto", [5, 6, 11, 12])
def test_they_are_told_as_drawn_ones_are(loop: EngineLoop, held: Held, upto: int) -> None:
    number, sink = begun(loop, held)
    loop.feed(number, 8, tuple(range(19, 22)))  # leaves a gap
    loop.feed(number, 2, tuple(range(13, 11 + upto)))
    loop.feed(number, 3, tuple(range(14, 11 + upto)))
    held.go.set()
    pieces = said(sink)
    assert [piece.ids for piece in pieces] == [(11 + at,) for at in range(12)]
    assert [piece.text for piece in pieces] == [f"{11 + at} " for at in range(12)]
    assert [piece.finish for piece in pieces] == [None] * 11 + ["length"]
    assert held.drawn == [11, 12, 13, 14, *range(11 + upto, 23)]


def test_a_stop_string_among_them_ends_it(loop: EngineLoop, held: Held) -> None:
    number, sink = begun(loop, held, stop=("17 ",))
    loop.feed(number, 4, tuple(range(15, 20)))
    held.go.set()
    pieces = said(sink)
    assert "".join(piece.text for piece in pieces) == "11 12 13 14 15 16 "
    assert (pieces[-1].ids, pieces[-1].finish) == ((17,), "stop")


def test_whoever_has_drawn_others_ends(loop: EngineLoop, held: Held) -> None:
    number, sink = begun(loop, held)
    loop.feed(number, 2, (14, 15))
    held.go.set()
    with pytest.raises(NotDeterministic):
        said(sink)
    loop.feed(number, 0, (1,))  # it is over
    sink = ThreadSink()
    loop.submit(Request(id=-1, prompt=(1,), sampling=Sampling(max_tokens=2)), sink)
    assert [piece.ids for piece in said(sink)] == [(2,), (3,)]


def held_request(loop: EngineLoop, *emitted: int, **sampling: object) -> tuple[int, ThreadSink]:
    sink = ThreadSink()
    asked = Sampling(**{"max_tokens": 9, **sampling})  # type: ignore[arg-type]
    return loop.submit(Request(id=-1, prompt=(10,), emitted=emitted, sampling=asked, held=True), sink), sink


def test_one_that_is_held_tells_what_it_has_and_no_more(loop: EngineLoop, held: Held) -> None:
    number, sink = held_request(loop, 11, 12)
    pieces = iter(sink)
    assert [next(pieces).ids for _ in range(2)] == [(11,), (12,)]
    loop.feed(number, 1, (12, 13, 14), held=True)
    assert [next(pieces).ids for _ in range(2)] == [(13,), (14,)]
    assert held.drawn == []
    loop.feed(number, 4, (15,))
    rest = list(pieces)
    assert [piece.ids for piece in rest] == [(15,), (16,), (17,), (18,), (19,)]
    assert [piece.finish for piece in rest] == [None] * 4 + ["length"]
    assert held.drawn == [16, 17, 18, 19]


def test_one_that_is_held_ends_with_what_it_was_told_last(loop: EngineLoop) -> None:
    number, sink = held_request(loop, 11)
    loop.feed(number, 1, tuple(range(12, 20)), held=True)
    assert [(piece.ids, piece.finish) for piece in said(sink)][-2:] == [((18,), None), ((19,), "length")]
    number, sink = held_request(loop, 11, stop=("13 ",))
    loop.feed(number, 1, (12, 13), held=True)
    assert [piece.finish for piece in said(sink)] == [None, None, "stop"]


def test_one_that_is_held_while_it_draws_tells_what_is_being_drawn_and_no_more(loop: EngineLoop, held: Held) -> None:
    number, sink = begun(loop, held)
    loop.feed(number, 0, (), held=True)
    held.go.set()
    pieces = iter(sink)
    assert [next(pieces).ids for _ in range(4)] == [(11,), (12,), (13,), (14,)]
    assert next(pieces) == Piece(rests=True)
    other = ThreadSink()
    loop.submit(Request(id=-1, prompt=(50,), sampling=Sampling(max_tokens=4)), other)
    assert [piece.ids for piece in said(other)] == [(51,), (52,), (53,), (54,)], "steps go on"
    assert held.drawn == [11, 12, 13, 14, 51, 52, 53, 54]
    loop.feed(number, 0, ())
    assert [piece.ids for piece in pieces] == [(11 + at,) for at in range(4, 12)]


@pytest.fixture
def slowest(monkeypatch: pytest.MonkeyPatch) -> float:
    """Longer than any test."""
    monkeypatch.setattr(engine_loop, "_SLOW_FOR_S", 100 * GIVE_UP_S)
    return 100 * GIVE_UP_S


@pytest.mark.parametrize("let", [lambda loop, number: loop.feed(number, 0, ()), EngineLoop.cancel])
def test_one_that_is_slowed_draws_a_token_in_so_long_and_is_let_again(
    loop: EngineLoop, held: Held, slowest: float, let: Callable[[EngineLoop, int], None]
) -> None:
    number, sink = begun(loop, held)
    loop.slow(number, slowest)
    other = ThreadSink()
    loop.submit(Request(id=-1, prompt=(50,), sampling=Sampling(max_tokens=4)), other)
    held.go.set()
    pieces = iter(sink)
    assert [next(pieces).ids for _ in range(4)] == [(11,), (12,), (13,), (14,)]
    time.sleep(0.05)
    assert held.drawn == [11, 12, 13, 14], "the next step rests, with all that are in it"
    let(loop, number)
    assert [piece.ids for piece in said(other)] == [(51,), (52,), (53,), (54,)]


def test_of_two_that_are_slowed_the_slower_one_counts(loop: EngineLoop, held: Held, slowest: float) -> None:
    number, sink = begun(loop, held)
    loop.slow(number, slowest)
    other = ThreadSink()
    second = loop.submit(Request(id=-1, prompt=(50,), sampling=Sampling(max_tokens=4)), other)
    loop.slow(second, 0.0)
    held.go.set()
    pieces = iter(sink)
    assert [next(pieces).ids for _ in range(4)] == [(11,), (12,), (13,), (14,)]
    time.sleep(0.05)
    assert held.drawn == [11, 12, 13, 14]
    loop.cancel(number)
    assert len(said(other)) == 4


@pytest.mark.parametrize(("interval_s", "for_s"), [(0.005, 100 * GIVE_UP_S), (100 * GIVE_UP_S, 0.005)])
def test_one_that_is_slowed_draws_on(
    monkeypatch: pytest.MonkeyPatch, loop: EngineLoop, held: Held, interval_s: float, for_s: float
) -> None:
    """And as before when nobody has said it again: whoever did may be gone."""
    monkeypatch.setattr(engine_loop, "_SLOW_FOR_S", for_s)
    number, sink = begun(loop, held)
    loop.slow(number, interval_s)
    held.go.set()
    assert [piece.ids for piece in said(sink)] == [(11 + at,) for at in range(12)]


def test_one_that_is_held_or_has_ended_slows_nobody(loop: EngineLoop, held: Held, slowest: float) -> None:
    number, _ = begun(loop, held)
    loop.slow(number, slowest)
    loop.feed(number, 0, (), held=True)
    loop.slow(number + 1, slowest)  # there is none
    held.go.set()
    other = ThreadSink()
    loop.submit(Request(id=-1, prompt=(50,), sampling=Sampling(max_tokens=4)), other)
    assert len(said(other)) == 4


Told = tuple[int, tuple[int, ...], bool]


def never(_: float) -> None:
    raise AssertionError


def test_a_call_draws_when_all_of_it_may() -> None:
    fed, taken = Fed(((1, 2), (3,)), held=True), [list[Told](), list[Told]()]

    def take(number: int) -> Take:
        return lambda first, ids, held: taken[number].append((first, ids, held))

    assert [fed.holds(number, beside=True) for number in range(3)] == [True] * 3
    for number in range(2):
        fed.join(number, take(number), never, beside=True)
    fed.tell(0, 2, (3,), held=True)
    fed.tell(1, 1, (4,))
    assert taken == [[(0, (1, 2), True), (2, (3,), True), (0, (), False)], [(0, (3,), True), (1, (4,), False)]]
    assert not fed.holds(2, beside=True)
    fed.join(2, take(0), never, beside=True)
    assert taken[0][3:] == [(0, (), False)], "it may have been made before"


def test_a_call_that_runs_is_held_and_let_again() -> None:
    """Also a generation that was made before, and runs later, and one to come."""
    fed, taken, slowed = Fed(()), list[Told](), list[float]()

    def take(first: int, ids: tuple[int, ...], *, held: bool) -> None:
        taken.append((first, ids, held))

    leave = fed.join(0, take, slowed.append)
    assert (taken, fed.holds(0, beside=False)) == ([], False)
    fed.hold()
    assert (taken, fed.holds(1, beside=False)) == ([(0, (), True)], True)
    leave()
    fed.join(1, take, slowed.append)
    assert taken[1:] == [(0, (), True)]
    fed.tell(0, 0, ())
    assert (taken[2:], fed.holds(2, beside=False)) == ([(0, (), False)], False)


def test_a_call_that_runs_is_slowed_and_let_again() -> None:
    fed, taken, slowed = Fed(()), list[Told](), list[float]()

    def take(first: int, ids: tuple[int, ...], *, held: bool) -> None:
        taken.append((first, ids, held))

    leave = fed.join(0, take, slowed.append)
    assert not fed.leaves
    fed.slow(0.5)
    assert (slowed, taken, fed.leaves) == ([0.5], [], True)
    fed.tell(1, 0, (7,), held=True)
    assert (taken, fed.leaves) == ([], True), "what it is told of another generation lets it not"
    fed.tell(0, 0, ())
    assert (taken, fed.leaves) == ([(0, (), False)], False)
    leave()
    fed.slow(0.5)
    assert slowed == [0.5], "nothing of it runs"


def test_all_that_are_slowed_are_let_by_a_word_to_one_of_them() -> None:
    """The move is given up: none of them is slow until the two seconds are over."""
    fed, taken = Fed(()), [list[Told](), list[Told]()]

    def take(number: int) -> Take:
        return lambda first, ids, held: taken[number].append((first, ids, held))

    for number in range(2):
        fed.join(number, take(number), lambda interval_s: None, beside=True)
    fed.slow(0.5)
    fed.tell(0, 0, ())
    assert taken == [[(0, (), False)], [(0, (), False)]]


def test_a_generation_that_another_follows_draws_how_it_ended() -> None:
    fed, taken = Fed(((1, 2),), held=True), list[Told]()
    fed.join(0, lambda first, ids, held: taken.append((first, ids, held)), never)
    fed.tell(1, 0, (), held=True)
    assert (fed.holds(0, beside=False), taken) == (True, [(0, (1, 2), True)])
    fed.tell(1, 0, (5,), held=True)
    assert (fed.holds(0, beside=False), fed.holds(1, beside=False)) == (False, True)
    assert taken[1:] == [(0, (), False)]


def test_one_of_several_that_has_ended_draws_how() -> None:
    """Told at its beginning, with its last ids, or when nothing else is new; and one without any ids."""
    fed, taken = Fed(((1, 2), (3,), (), (4,)), (0, 2), held=True), defaultdict[int, list[Told]](list)

    def take(number: int) -> Take:
        return lambda first, ids, held: taken[number].append((first, ids, held))

    for number in range(4):
        fed.join(number, take(number), never, beside=True)
    assert [taken[number][-1][2] for number in range(4)] == [False, True, False, True]
    fed.tell(1, 1, (5,), held=True, ended=True)
    assert (taken[1][1:], taken[3][1:]) == ([(1, (5,), False)], [])
    fed.tell(3, 1, (), held=True, ended=True)
    assert taken[3][1:] == [(1, (), False)]
    fed.tell(4, 0, (6,), held=True, ended=True)
    assert (fed.holds(4, beside=True), fed.holds(5, beside=True)) == (False, True)
    assert [len(taken[number]) for number in range(4)] == [1, 2, 1, 2]


@pytest.mark.parametrize("act", [Fed.hold, lambda fed: fed.tell(5, 0, (), held=True), lambda fed: fed.tell(5, 0, ())])
def test_generations_end_while_the_call_is_held_or_let(act: Callable[[Fed], None]) -> None:
    """In threads of their own, just when it is asked what they do."""

    class Ends:
        """As ``beside``: it leaves when it is looked at."""

        def __bool__(self) -> bool:
            for leave in leaving:
                leave()
            return True

    fed, leaving = Fed((), held=True), list[Callable[[], None]]()
    for number in range(3):
        leaving.append(fed.join(number, lambda first, ids, held: None, never, beside=Ends()))  # type: ignore[arg-type]
    act(fed)
    act(fed)


def test_one_that_is_let_while_it_joins_is_let() -> None:
    fed, taken, threads = Fed(((1, 2),), held=True), list[bool](), list[threading.Thread]()

    def take(first: int, ids: tuple[int, ...], *, held: bool) -> None:
        if not threads:
            threads.append(threading.Thread(target=lambda: fed.tell(0, 2, (3,))))
            threads[0].start()
            threads[0].join(0.05)  # long enough to come first, if it could
        taken.append(held)

    fed.join(0, take, never)
    threads[0].join(GIVE_UP_S)
    assert taken == [True, False]


def test_what_comes_before_its_generation_waits_for_it() -> None:
    fed = Fed(((1, 2),))
    taken: list[tuple[int, tuple[int, ...]]] = []
    fed.tell(0, 1, (2, 3))
    fed.tell(1, 1, (7,))  # a gap
    fed.tell(1, 0, (6,))
    assert (fed.known(0), fed.known(1), fed.known(2)) == ((1, 2, 3), (6,), ())
    fed.tell(1, 1, (7,))
    leave = fed.join(1, lambda first, ids, held: taken.append((first, ids)), never)
    fed.tell(1, 2, (8, 9))
    assert taken == [(0, (6, 7)), (2, (8, 9))]
    leave()
    with pytest.raises(NotDeterministic):
        fed.tell(0, 0, (2,))


def test_what_waits_is_bounded() -> None:
    fed = Fed(((1,) * 10,))
    fed.tell(1, 0, (2,) * MOST_IDS)
    fed.tell(2, 0, (2,))
    fed.tell(MOST_GENERATIONS, 0, (2,))
    assert [len(fed.known(number)) for number in (1, 2, MOST_GENERATIONS)] == [MOST_IDS - 10, 0, 0]
