"""Write-behind to the store: the newest record of each key, one at a time, in order. Who must know waits for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from sllm_runtime.control.changes import Write
from sllm_runtime.platform.state import StateStore
from sllm_runtime.protocol.errors import NotStorable, SllmError, StoreFull, Unavailable
from sllm_runtime.protocol.records import Record

log = logging.getLogger(__name__)

AGAIN_S: Final = 0.2
FULL_S: Final = 3.0
"""How long is waited for a disk that is full: somebody has to do something first."""
_UNKNOWN: Final = object()


class _Waiter:
    """Whoever waits until the store has said something about each of ``keys``."""

    def __init__(self, keys: set[str]) -> None:
        self.keys = keys
        self.refused: SllmError | None = None
        self.done = asyncio.Event()

    def over(self, key: str, refused: SllmError | None) -> None:
        if key in self.keys:
            self.keys.discard(key)
            self.refused = self.refused or refused
        if not self.keys:
            self.done.set()


class Ledger:
    """Holds what the store does not have yet. Bounded by the number of keys: a newer record replaces one that waits.

    While the store cannot be reached the writes wait; one that it refuses for good is left out, so that the others go
    on, and one that has no room lets others go first: they may be smaller, or make some. ``run`` ends with
    ``StaleTerm`` when another controller leads.
    """

    def __init__(self, store: StateStore, shortage: Callable[[], str] = lambda: "") -> None:
        self._store = store
        self._shortage = shortage
        self._waiting: dict[str, Record | None] = {}
        self._full = ""
        """Why the last record that found no room found none; empty: what was written since had some."""
        self._newest: dict[str, object] = {}
        """What the store took last under each key of the newest decision (``stored``); _UNKNOWN: nothing since then."""
        self._wake = asyncio.Event()
        self._waiters: set[_Waiter] = set()

    @property
    def waiting(self) -> int:
        """Records that the store does not have yet."""
        return len(self._waiting)

    async def require_room(self) -> None:
        """As ``StateStore``."""
        await self._store.require_room()

    def take(self, writes: Sequence[Write]) -> None:
        """Write these after what already waits; not what the store took last of a decision (``stored``)."""
        for write in writes:
            if write.key not in self._waiting and self._newest.get(write.key, _UNKNOWN) == write.record:
                continue
            self._waiting.pop(write.key, None)
            self._waiting[write.key] = write.record
        if self._waiting:
            self._wake.set()

    async def stored(self, writes: Sequence[Write], timeout_s: float) -> None:
        """Take these and wait until the store has them, or newer ones. Raises ``NotStorable``, ``Unavailable`` after
        ``timeout_s``, FULL_S on a full disk; then some of them may be stored, and the others still wait to be."""
        self.take(writes)
        keys = {write.key for write in writes}
        self._newest = {key: self._newest.get(key, _UNKNOWN) for key in keys}
        refused = await self._over(keys & self._waiting.keys(), timeout_s)
        if refused is not None:
            raise refused

    async def settled(self, timeout_s: float, *keys: str) -> None:
        """Wait until everything taken, or what was of ``keys``, is stored, or refused for good, which its own writer
        hears. Raises ``Unavailable`` as ``stored``."""
        await self._over(self._waiting.keys() & keys if keys else set(self._waiting), timeout_s)

    async def _over(self, keys: set[str], timeout_s: float) -> SllmError | None:
        if not keys:
            return None
        waiter = _Waiter(keys)
        self._waiters.add(waiter)
        try:
            while not await _within(waiter.done, min(timeout_s, FULL_S)):
                timeout_s -= FULL_S
                if (shortage := self._shortage()) or timeout_s <= 0:  # a disk may also become full meanwhile
                    why = shortage or self._full or "NATS does not take it; try again"
                    raise Unavailable(f"the state cannot be stored now: {why}")
        finally:
            self._waiters.discard(waiter)
        return waiter.refused

    async def run(self) -> None:
        """Write until cancelled. Raises ``StaleTerm``."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            full = 0
            while self._waiting:
                key = next(iter(self._waiting))
                full = 0 if await self._write(key, self._waiting[key]) else full + 1
                if full and full >= len(self._waiting):
                    await asyncio.sleep(AGAIN_S)
                    full = 0

    async def _write(self, key: str, record: Record | None) -> bool:
        """False: there is no room for it, and it waits behind all others."""
        refused: SllmError | None = None
        try:
            if record is None:
                await self._store.delete(key)
            else:
                await self._store.put(key, record)
        except NotStorable as error:
            log.error("%s", error.message)
            refused = error
        except StoreFull as error:
            log.warning("%s waits to be stored: %s", key, error.message)
            self._full = error.message
            if key in self._waiting and self._waiting[key] is record:
                self._waiting[key] = self._waiting.pop(key)
            return False
        except Unavailable as error:
            log.warning("%s waits to be stored: %s", key, error.message)
            await asyncio.sleep(AGAIN_S)
            return True
        else:
            self._full = "" if record is not None else self._full
            if key in self._newest:
                self._newest[key] = record
        # What was put meanwhile stays: only what was written is done.
        if key in self._waiting and self._waiting[key] is record:
            del self._waiting[key]
            for waiter in self._waiters:
                waiter.over(key, refused)
        return True


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether it is set within so long."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass  # it may have been set in that moment
    return event.is_set()
