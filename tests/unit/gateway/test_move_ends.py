"""A call of several generations moves, of which some have ended where it comes from."""

from __future__ import annotations

from sllm_gateway.binding import Binding
from sllm_gateway.move import Move, Stage
from sllm_gateway.resumption import Resumption
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.frames import Feed, Frame, FrameKind, Ids
from sllm_runtime.protocol.limits import FEED_IDS
from tests.unit.gateway.peer import entry

NOW = 16.0


def ids(generation: int, first: int, *numbers: int, ended: bool = False) -> Frame:
    return Frame(0, FrameKind.IDS, codec.pack(Ids(generation, first, numbers, ended)))


def feed(generation: int, first: int, *numbers: int, ended: bool = False) -> Feed:
    return Feed("call", 2, generation, first, numbers, held=True, ended=ended)


def moving(*told: Frame) -> tuple[Resumption, Move]:
    """A call of which the source has ``told``; the destination rests when it has computed that."""
    kept = Resumption()
    kept.take(told)
    kept.watch()
    move = Move(Binding("call", 2, entry("i2"), b"", 1 << 20, NOW), kept)
    move.opened(True, NOW)
    return kept, move


def test_the_destination_is_told_which_have_ended_until_it_says_so() -> None:
    """With their last ids, or alone where it has those; of one without any ids too."""
    kept, move = moving(ids(0, 0, 1, 2, ended=True), ids(1, 0, 3, 4))
    assert kept.ended == (0,)
    assert move.take([ids(0, 0, 1, 2), ids(0, 2, ended=True), ids(1, 0, 3, 4)], NOW)[0] == []
    assert (move.lacking(), move.computed) == ([], True)
    kept.take([ids(1, 2, 5, ended=True), ids(2, 0, ended=True)])
    assert move.feed(NOW) == [feed(1, 2, 5, ended=True), feed(2, 0, ended=True)]
    move.take([ids(1, 2, 5)], NOW)
    assert move.lacking() == [feed(1, 3, ended=True), feed(2, 0, ended=True)]
    move.take([ids(1, 3, ended=True), ids(2, 0, ended=True)], NOW)
    assert move.lacking() == []


def test_of_many_ids_the_last_say_it() -> None:
    kept, move = moving(ids(0, 0, 1))
    kept.take([ids(0, 1, *([7] * (FEED_IDS + 1)), ended=True)])
    assert [(each.first, len(each.ids), each.ended) for each in move.lacking()] == [
        (0, FEED_IDS, False), (FEED_IDS, 2, True),
    ]  # fmt: skip


def test_an_end_that_the_source_has_not_told_is_the_callers_to_have() -> None:
    kept, move = moving(ids(0, 0, 1))
    ended = ids(0, 1, ended=True)
    assert move.take([ids(0, 0, 1), ended], NOW)[0] == []
    move.hand(NOW)
    assert move.switch(NOW)[0] == [ended]
    kept.take([ended])
    assert kept.ended == (0,)


def test_a_source_rests_by_saying_none_and_not_by_an_end() -> None:
    _, move = moving(ids(0, 0, 1), ids(1, 0, 2))
    move.take([ids(0, 0, 1), ids(1, 0, 2)], NOW)
    move.hand(NOW)
    assert move.stage is Stage.HANDED
    move.heard([ids(0, 1, ended=True)], NOW)
    assert not move.goes_over(NOW)
    move.heard([ids(1, 1)], NOW)
    assert move.goes_over(NOW)
