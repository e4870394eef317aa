"""The first step of requests that are held, once before it counts.

What a library makes for a number of rows that it has not seen (oneDNN its code: 2 ms and 600 page faults) is made while
nobody waits, not when a call goes over and its caller does.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from sllm_runtime.worker.engine.ours.runner import Runner
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence, State


class Rehearsal:
    """Of one engine, whose model is in this process: elsewhere others would compute beside it (``due`` is never so)."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._known: set[int] = set()
        """Rows of steps that were rehearsed."""
        self._planned: list[Sequence] = []

    @property
    def due(self) -> bool:
        """Whether there is one that was not rehearsed."""
        return bool(self._planned)

    def plan(self, running: Many[Sequence]) -> None:
        """Some have come to rest. Their next step computes the last row of each again, and draws from it."""
        resting = [each for each in running if _rests(each)]
        can = self._runner.head is not None and self._runner.depth == 1
        self._planned = resting if can and len(resting) not in self._known else []

    def compute(self) -> None:
        """That step, of those who rest still. What it writes is there already, with the same bits; what it would draw
        from is dropped."""
        planned, self._planned = [each for each in self._planned if _rests(each)], []
        head = self._runner.head
        if planned and head is not None:
            self._known.add(len(planned))
            self._runner.launch([Chunk(each, each.computed - 1, 1) for each in planned], ())
            self._runner.collect()
            head(range(len(planned)))


def _rests(sequence: Sequence) -> bool:
    return sequence.state is State.HELD and sequence.computed == len(sequence.tokens)
