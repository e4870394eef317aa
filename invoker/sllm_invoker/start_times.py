"""How long the parts of a start took that are made side by side. By one clock, the node's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.timeline import CONVERT, SANDBOX, Span

T = TypeVar("T")


class StartTimes:
    """Begins now. A model that has to be made on this node first is a stage of its own: the controller learns from
    ``sandbox`` what the node's next starts take."""

    def __init__(self, report: Callable[[Progress], None], clock: Callable[[], float]) -> None:
        self._report, self._clock = report, clock
        self._began = clock()
        self._there = 0.0
        self._converting: float | None = None

    async def timed(self, part: Awaitable[T]) -> T:
        """``part``, one of those that make a sandbox."""
        made = await part
        self._there = self._ms()
        return made

    def told(self, progress: Progress) -> None:
        """How far loaderd is: noted, and passed on."""
        if progress.stage == CONVERT and self._converting is None:
            self._converting = self._ms()
        self._report(progress)

    def spans(self) -> tuple[Span, ...]:
        """Now, when everything is there; in ms from the beginning on."""
        end = self._ms()
        if self._converting is None:
            return (Span(SANDBOX, 0.0, end),)
        return Span(SANDBOX, 0.0, self._there), Span(CONVERT, self._converting, end - self._converting)

    def _ms(self) -> float:
        return (self._clock() - self._began) * 1000
