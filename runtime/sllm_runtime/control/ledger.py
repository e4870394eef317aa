"""Write-behind to the store: the newest record of each key, one at a time, in order. Decisions never wait for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from sllm_runtime.control.changes import Write
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import StaleTerm, Unavailable
from sllm_runtime.protocol.records import Record

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.2
FULL_S: Final = 3.0
"""How long is waited for a disk that is full: somebody has to do something first."""


class Ledger:
    """Holds what the store does not have yet. Bounded by the number of keys: a newer record replaces one that waits.

    While the store cannot be reached the writes wait; ``run`` ends with ``StaleTerm`` when another controller leads.
    """

    def __init__(self, store: StateStore, shortage: Callable[[], str] = lambda: "") -> None:
        self._store = store
        self._shortage = shortage
        self._waiting: dict[str, Record | None] = {}
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def waiting(self) -> int:
        """Records that the store does not have yet."""
        return len(self._waiting)

    def take(self, writes: list[Write]) -> None:
        """Write these after what already waits."""
        for write in writes:
            self._waiting.pop(write.key, None)
            self._waiting[write.key] = write.record
        if self._waiting:
            self._empty.clear()
            self._wake.set()

    async def settled(self, timeout_s: float) -> None:
        """Wait until everything taken is stored. Raises ``Unavailable`` after ``timeout_s``, FULL_S on a full disk."""
        try:
            async with asyncio.timeout(min(timeout_s, FULL_S) if self._shortage() else timeout_s):
                await self._empty.wait()
        except TimeoutError as error:
            why = self._shortage() or "NATS does not take it; try again"
            raise Unavailable(f"the state cannot be stored now: {why}") from error

    async def run(self) -> None:
        """Write until cancelled. Raises ``StaleTerm``."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                key = next(iter(self._waiting))
                await self._write(key, self._waiting[key])
            self._empty.set()

    async def _write(self, key: str, record: Record | None) -> None:
        try:
            if record is None:
                await self._store.delete(key)
            else:
                await self._store.put(key, record)
        except StaleTerm:
            raise
        except Unavailable as error:
            log.warning("%s waits to be stored: %s", key, error.message)
            await asyncio.sleep(AGAIN_S)
            return
        # What was put meanwhile stays: only what was written is done.
        if key in self._waiting and self._waiting[key] is record:
            del self._waiting[key]
