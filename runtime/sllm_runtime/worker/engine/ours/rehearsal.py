"""The first step of requests that are held, once before it counts.

What a library makes for a number of rows that it has not seen (oneDNN its code: 2 ms and 600 page faults) is made while
nobody waits, not when a call goes over and its caller does.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.runner import Runner
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence, State


class Rehearsal:
    """Of one engine whose ``runner`` can (``Runner.rehearses``); nothing is ever ``due`` for others."""

    def __init__(self, runner: Runner, numerics: Numerics) -> None:
        self._runner = runner
        self._numerics = numerics
        self._known: set[int] = set()
        """Rows, padding included, of steps in which nothing but the last of each request was computed."""
        self._planned: list[Sequence] = []

    @property
    def due(self) -> bool:
        """Whether there is one to rehearse."""
        return bool(self._planned)

    def computed(self, chunks: Many[Chunk]) -> None:
        """A step of these was."""
        rows = self._numerics.padded(len(chunks))
        if rows not in self._known and all(chunk.count == 1 for chunk in chunks):  # nearly always it is: each step asks
            self._known.add(rows)

    def plan(self, running: Many[Sequence]) -> None:
        """Some have come to rest. Their next step computes the last row of each again, and draws from it."""
        resting = [each for each in running if _rests(each)] if self._runner.rehearses else []
        self._planned = [] if self._numerics.padded(len(resting)) in self._known else resting

    def compute(self) -> None:
        """That step, of those who rest still. What it writes is there already, with the same bits; what it would draw
        from is dropped."""
        planned, self._planned = [each for each in self._planned if _rests(each)], []
        head = self._runner.head
        if planned and head is not None:
            chunks = [Chunk(each, each.computed - 1, 1) for each in planned]
            self._runner.launch(chunks, ())
            self._runner.collect()
            head(range(len(planned)))
            self.computed(chunks)


def _rests(sequence: Sequence) -> bool:
    return sequence.state is State.HELD and sequence.computed == len(sequence.tokens)
