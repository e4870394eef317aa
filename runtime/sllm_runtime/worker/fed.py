"""The ids that a call's generations had elsewhere: those of a resume, and those that a move tells while it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from sllm_runtime.protocol.limits import MOST_GENERATIONS, MOST_IDS
from sllm_runtime.worker.engine.feeding import beyond


class Take(Protocol):
    """``EngineLoop.feed`` for one request."""

    def __call__(self, first: int, ids: tuple[int, ...], /, *, held: bool) -> None: ...


@dataclass(frozen=True, slots=True)
class _Running:
    take: Take
    slow: Callable[[float], None]
    beside: bool


class Fed:
    """Token ids that one call's generations get from elsewhere, as it moves here. From any thread. What a generation
    that runs is told goes to it, what comes before waits for it.

    ``held``: the call is on its way here and draws nothing before it may (``CallHead.held``), but for the end of
    generations that have ``ended``; one that runs draws no more from ``hold`` on, and slower from ``slow`` on, before
    it is let again.
    """

    def __init__(
        self,
        recorded: Sequence[tuple[int, ...]],
        ended: Iterable[int] = (),
        *,
        cached: Sequence[int | None] = (),
        held: bool = False,
    ) -> None:
        self._cached = {number: found for number, found in enumerate(cached) if found is not None}
        self._known = {number: list(ids) for number, ids in enumerate(recorded)}
        self._last = len(recorded) - 1
        """The latest generation that any ids are known of."""
        self._count = sum(map(len, recorded))
        self._ended = set(ended)
        self._held = self._was_held = held
        self._slow = False
        self._running: dict[int, _Running] = {}
        self._lock = threading.Lock()

    def known(self, generation: int) -> tuple[int, ...]:
        """Ids that ``generation`` begins with."""
        with self._lock:
            return tuple(self._known.get(generation, ()))

    def cached(self, generation: int) -> int | None:
        """Tokens of its prompt that were found computed where it was first; None: that is not known, or here."""
        return self._cached.get(generation)

    @property
    def leaves(self) -> bool:
        """Whether it draws nothing, or slower than it could: it is on its way here, or away."""
        with self._lock:
            return self._held or self._slow

    def holds(self, generation: int, *, beside: bool) -> bool:
        """Whether ``generation`` draws nothing yet. One that has ended where it comes from draws how; so does one that
        another has followed, unless they run ``beside`` each other: it is over there."""
        with self._lock:
            return self._holds(generation, beside)

    def _holds(self, generation: int, beside: bool) -> bool:
        return self._held and generation not in self._ended and (beside or generation >= self._last)

    def tell(
        self,
        generation: int,
        first: int,
        ids: tuple[int, ...],
        *,
        held: bool = False,
        ended: bool = False,
        cached: int | None = None,
    ) -> None:
        """Those from ``first`` on are ``ids``, with which it has ``ended``, maybe; the call stays ``held``, if it is.
        What leaves a gap, or is too much, is of no use: it is drawn again.

        Raises ``NotDeterministic`` for others than a generation to come was told.
        """
        with self._lock:
            if cached is not None:
                self._cached.setdefault(generation, cached)
            running = self._running.get(generation)
            if running is None and 0 <= generation < MOST_GENERATIONS:
                known = self._known.setdefault(generation, [])
                new = beyond(known, first, ids)[: MOST_IDS - self._count]
                known += new
                self._count += len(new)
            let_go = self._advance(generation if ids else -1, held, {generation} if ended else set())
            stays = running is not None and self._holds(generation, running.beside)
        if running is not None:
            running.take(first, ids, held=stays)
        for each in let_go:
            if each is not running:
                each.take(0, (), held=False)

    def slow(self, interval_s: float) -> None:
        """Every generation that runs draws slower before the call is let (``EngineLoop.slow``). Repeatable."""
        with self._lock:
            self._slow = True
            running = list(self._running.values())
        for each in running:
            each.slow(interval_s)

    def hold(self) -> None:
        """No generation draws any more before the call is let. Repeatable."""
        with self._lock:
            self._held = self._was_held = True
            stop = [each for number, each in self._present.items() if self._holds(number, each.beside)]
        for each in stop:
            each.take(0, (), held=True)

    def _advance(self, generation: int, held: bool, ended: set[int]) -> list[_Running]:
        """Ids of ``generation`` are known, and of ``ended`` all. Those that are held no longer."""
        present = self._present
        before = [number for number, each in present.items() if self._slow or self._holds(number, each.beside)]
        self._held, self._slow = self._held and held, self._slow and held
        self._last = max(self._last, generation)
        self._ended |= ended
        if self._slow:
            return []
        return [present[number] for number in before if not self._holds(number, present[number].beside)]

    @property
    def _present(self) -> dict[int, _Running]:
        """Those that run now; a copy, made in one go. One that ends leaves without the lock: a generator's finaliser
        may be what ends it, run by a garbage collection under that very lock."""
        return dict(self._running)

    def join(
        self, generation: int, take: Take, slow: Callable[[float], None], *, beside: bool = False
    ) -> Callable[[], None]:
        """``generation`` runs: it takes what it was told since ``known``, and what comes, and is slowed by ``slow``.
        Returns what ends that."""
        with self._lock:
            self._running[generation] = _Running(take, slow, beside)
            known = tuple(self._known.get(generation, ()))
            held = self._holds(generation, beside)
            if known or self._was_held:  # it may have been held or let go since it was made
                take(0, known, held=held)  # under the lock: what ``tell`` says from now on comes after it
        return lambda: (self._running.pop(generation, None), None)[1]
