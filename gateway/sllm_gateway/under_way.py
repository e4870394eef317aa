"""Calls on their way to another instance, and what is done next for those to the same one. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from sllm_gateway.call import Call
from sllm_gateway.move import Move, Stage


class Next(Enum):
    """What is done for calls on their way to the same instance."""

    WAIT = auto()
    FEED = auto()
    """The destination is told what it lacks of each (``Move.feed``)."""
    BESIDE = auto()
    """The destination draws, and their source slower than it could (``Move.beside``)."""
    HAND = auto()
    """Their source is to draw no more (``Move.hand``)."""


def together(moves: Sequence[Move], now: float) -> tuple[Next, list[Move]]:
    """What is done next, and for which of ``moves``, whose source and destination are the same.

    They are looked at when a step of the source has ended: each of them has given out an output since the last time, or
    one has given out two. Nothing is told to a destination that computes: it has one step of all of them then.
    """
    drawing = [move for move in moves if move.stage in (Stage.OPENED, Stage.FOLLOWS)]
    if not _stepped(drawing, now):
        return Next.WAIT, []
    for move in drawing:
        move.outputs = 0
    ready = [move for move in drawing if move.ready]
    computing = any(move.filling or (move.stage is Stage.FOLLOWS and not move.ready) for move in drawing)
    if not ready or (computing and not any(move.impatient(now) for move in ready)):
        return Next.WAIT, []
    resting = [move for move in ready if move.resting]
    if not all(move.near(now) for move in resting):
        return Next.FEED, resting
    if any(move.overtakes for move in resting):
        return Next.BESIDE, resting
    return Next.HAND, [move for move in ready if move.near(now)]  # for those that draw along nobody waits


def going(moves: Sequence[Move], now: float) -> list[Move]:
    """Which of ``moves``, of one source and destination, go over: those that rest together, since what a destination
    has begun to compute for one of them the others wait for."""
    ready = [move for move in moves if move.goes_over(now)]
    others = [move for move in moves if move.stage is Stage.HANDED and move.resting and move not in ready]
    return [move for move in ready if not move.resting or all(other.late(now) for other in others)]


def _stepped(moves: Sequence[Move], now: float) -> bool:
    return any(move.outputs > 1 for move in moves) or all(move.outputs or move.quiet(now) for move in moves)


class UnderWay:
    """The calls that are moving: open at their destination, still served by their source. At most one move a call."""

    def __init__(self) -> None:
        self._moves: dict[str, tuple[Call, Move]] = {}

    def begin(self, call: Call, move: Move) -> None:
        """It is on its way."""
        self._moves[call.id] = (call, move)

    def end(self, call: Call) -> None:
        """It has gone over, or stays. Repeatable."""
        self._moves.pop(call.id, None)

    def all(self, node: str = "") -> list[tuple[Call, Move]]:
        """Those of now, to anywhere or to ``node``."""
        return [(call, move) for call, move in self._moves.values() if node in ("", move.binding.node)]

    def towards(self, instance: str) -> list[tuple[Call, Move]]:
        """Those on their way to ``instance``."""
        return [(call, move) for call, move in self._moves.values() if move.binding.instance == instance]

    def call(self, move: Move) -> Call:
        """Whose ``move`` it is."""
        return self._moves[move.binding.call][0]

    def instances(self) -> set[str]:
        """Where they are on their way to."""
        return {move.binding.instance for _, move in self._moves.values()}
