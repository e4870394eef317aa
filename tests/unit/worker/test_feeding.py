"""Ids that a call had elsewhere come into the one that runs here."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest

from sllm_runtime.protocol.errors import NotDeterministic
from sllm_runtime.protocol.limits import MOST_GENERATIONS, MOST_IDS
from sllm_runtime.worker.engine.base import Request, Sampling
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.engine.scripted import ScriptedEngine
from sllm_runtime.worker.engine.sinks import Piece, ThreadSink
from sllm_runtime.worker.fed import Fed
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


def test_what_comes_before_its_generation_waits_for_it() -> None:
    fed = Fed(((1, 2),))
    taken: list[tuple[int, tuple[int, ...]]] = []
    fed.tell(0, 1, (2, 3))
    fed.tell(1, 1, (7,))  # a gap
    fed.tell(1, 0, (6,))
    assert (fed.known(0), fed.known(1), fed.known(2)) == ((1, 2, 3), (6,), ())
    fed.tell(1, 1, (7,))
    leave = fed.join(1, lambda first, ids: taken.append((first, ids)))
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
