"""Whether the container engine works, from a command that failed to the next proof that it does.

An engine refuses commands for good reasons too (an image that is not there), so a failure alone is a suspicion: a
container is tried as at the node's start. One that hangs is a problem at once.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

from sllm_invoker.containers.engine import EngineFailed, EngineHangs
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)

AGAIN_S: Final = (1.0, 2.0, 5.0, 10.0)
"""Between two trials of an engine that does not work; the last of them again and again."""
Trial = Callable[[], Coroutine[Any, Any, None]]
"""Runs a container to its end. Raises ``Unavailable``; bounded in time."""


class Health:
    """``suspect`` is told of every command that failed. ``tasks``: their owner ends them."""

    def __init__(self, trial: Trial, tasks: Tasks, again_s: Sequence[float] = AGAIN_S) -> None:
        self._trial = trial
        self._tasks = tasks
        self._again_s = again_s
        self._looking: asyncio.Task[None] | None = None
        self._problem = ""

    @property
    def problem(self) -> str:
        """Why no container can be made now; empty: nothing is known against it."""
        return self._problem

    def suspect(self, error: EngineFailed) -> None:
        """A command has failed."""
        if isinstance(error, EngineHangs):
            self._found(error.message)
        if self._looking is None or self._looking.done():
            self._looking = self._tasks.start(self._look(), "look at the engine")

    async def _look(self) -> None:
        for delay in itertools.chain(self._again_s, itertools.repeat(self._again_s[-1])):
            try:
                await self._trial()
            except Unavailable as error:
                self._found(error.message)
            except OSError as error:  # this machine has no file or memory left for a trial, which may pass
                self._found(f"the container engine cannot be tried: {error}")
            else:
                break
            await asyncio.sleep(delay)
        if self._problem:
            log.warning("the container engine works again")
        self._problem = ""

    def _found(self, problem: str) -> None:
        if not self._problem:
            log.error("the container engine does not work, nothing is started here until it does: %s", problem)
        self._problem = problem
