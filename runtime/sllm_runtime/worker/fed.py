"""The ids that a call's generations had elsewhere: those of a resume, and those that a move tells while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from sllm_runtime.protocol.limits import MOST_GENERATIONS, MOST_IDS
from sllm_runtime.worker.engine.feeding import beyond

Take = Callable[[int, tuple[int, ...]], None]
"""``(first, ids)``, as ``EngineLoop.feed``."""


class Fed:
    """Of one call. From any thread. What a generation that runs is told goes to it, what comes before waits for it."""

    def __init__(self, recorded: Sequence[tuple[int, ...]]) -> None:
        self._known = {number: list(ids) for number, ids in enumerate(recorded)}
        self._count = sum(map(len, recorded))
        self._takers: dict[int, Take] = {}
        self._lock = threading.Lock()

    def known(self, generation: int) -> tuple[int, ...]:
        """Ids that ``generation`` begins with."""
        with self._lock:
            return tuple(self._known.get(generation, ()))

    def tell(self, generation: int, first: int, ids: tuple[int, ...]) -> None:
        """Those from ``first`` on are ``ids``. What leaves a gap, or is too much, is of no use: it is drawn again.

        Raises ``NotDeterministic`` for others than a generation to come was told.
        """
        with self._lock:
            taker = self._takers.get(generation)
            if taker is None and 0 <= generation < MOST_GENERATIONS:
                known = self._known.setdefault(generation, [])
                new = beyond(known, first, ids)[: MOST_IDS - self._count]
                known += new
                self._count += len(new)
        if taker is not None:
            taker(first, ids)

    def join(self, generation: int, taker: Take) -> Callable[[], None]:
        """``generation`` runs: it takes what it was told since ``known``, and what comes. Returns what ends that."""
        with self._lock:
            self._takers[generation] = taker
            known = tuple(self._known.get(generation, ()))
        if known:
            taker(0, known)
        return lambda: (self._takers.pop(generation, None), None)[1]
