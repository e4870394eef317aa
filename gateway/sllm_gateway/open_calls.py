"""The calls of this gateway that somebody still waits for: a caller, or the node that has to confirm their end."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, ValuesView

from sllm_gateway.call import Call


class OpenCalls:
    """Calls by id."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._of: dict[tuple[str, int], dict[str, Call]] = {}
        """Those of each version that has any."""
        self.collected = 0
        """Cost of the answers that are collected here to be whole, all calls together."""
        self.some = asyncio.Event()
        """Set while there are calls."""
        self.none = asyncio.Event()
        """Set while there are none."""
        self.none.set()

    def __len__(self) -> int:
        return len(self._calls)

    def get(self, call: str) -> Call | None:
        """The call of that id, if it is open."""
        return self._calls.get(call)

    def values(self) -> ValuesView[Call]:
        """All of them; make a list of it before anything that may end one."""
        return self._calls.values()

    def of(self, key: tuple[str, int]) -> Collection[Call]:
        """Those of a version; as ``values``."""
        return self._of.get(key, {}).values()

    def add(self, call: Call) -> None:
        self._calls[call.id] = call
        self._of.setdefault(call.version.key, {})[call.id] = call
        self.some.set()
        self.none.clear()

    def collects(self, call: Call, cost: int) -> None:
        """So much of its answer is here."""
        self.collected += cost - call.collected
        call.collected = cost

    def discard(self, call: Call) -> bool:
        """Whether ``call`` was open; it no longer is."""
        known = self._calls.get(call.id) is call
        if known:
            self.collects(call, 0)
            del self._calls[call.id]
            of = self._of[call.version.key]
            del of[call.id]
            if not of:
                del self._of[call.version.key]
        if not self._calls:
            self.some.clear()
            self.none.set()
        return known
