"""Calls on their way to another instance: those whose destination does not have them yet."""

from __future__ import annotations

from sllm_gateway.call import Call
from sllm_gateway.move import Move


class UnderWay:
    """One move a call."""

    def __init__(self) -> None:
        self._moves: dict[str, tuple[Call, Move]] = {}

    def begin(self, call: Call, move: Move) -> None:
        """In place of an earlier one of the call."""
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

    def beside(self, move: Move) -> list[Move]:
        """The others on their way to the same instance."""
        return [each for _, each in self.towards(move.binding.instance) if each is not move]
