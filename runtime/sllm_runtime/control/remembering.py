"""Has what starts, releases and moves have taught stored from time to time, for the controller that comes next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from sllm_runtime.control.changes import Write
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.scheduling import remembered
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.subjects import LEARNED_KEY

REMEMBER_S: Final = 10.0
"""What a controller that dies takes with it was learned in this time: it is no reason to wait for a disk at a start."""


class Remembering:
    """Stores it every REMEMBER_S (by ``pause``), where anything is new, from ``start`` to ``close``."""

    def __init__(self, loop: Loop, ledger: Ledger, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._loop, self._ledger, self._pause = loop, ledger, pause
        self._stored = loop.view.learned
        self._tasks = Tasks("remembering")

    def start(self) -> None:
        self._tasks.start(self._run(), "remember")

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self) -> None:
        while True:
            await self._pause(REMEMBER_S)
            self.remember()

    def remember(self) -> None:
        """Hand the ledger what is known now, if any of it is new."""
        learned = self._loop.view.learned
        if learned is not self._stored:
            self._stored = learned
            self._ledger.take([Write(LEARNED_KEY, remembered.record(learned))])
