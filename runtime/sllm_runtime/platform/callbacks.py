"""Who wants to be told when something happens to a connection."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import TypeAlias

log = logging.getLogger(__name__)

Callback: TypeAlias = Callable[[], Awaitable[None] | None]


class Callbacks:
    """Called one after another, in the order of ``add``; one that fails keeps the others from nothing."""

    def __init__(self) -> None:
        self._callbacks: list[Callback] = []

    def add(self, callback: Callback) -> Callable[[], None]:
        """Returns what takes it off again; repeatable."""
        self._callbacks.append(callback)

        def off() -> None:
            with contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return off

    async def run(self) -> None:
        """Call all that are there now."""
        for callback in list(self._callbacks):
            try:
                result = callback()
                if inspect.isawaitable(result):
                    await result
            except Exception:
                log.exception("what is to happen on a reconnect failed")
