"""What a gateway has heard of the others' logs, whether or not JetStream has taken it. No I/O."""

from __future__ import annotations

from collections import deque
from typing import Final

from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.lives import LIVES_AGE_S

MOST: Final = 16 * MIB
"""Bytes that are kept; the oldest go."""


class Overheard:
    """Messages by life and number; as old as the stream's at most."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._lives: dict[str, dict[int, bytes]] = {}
        self._order: deque[tuple[float, str, int]] = deque()
        self._bytes = 0

    def take(self, life: str, number: int, data: bytes, now: float) -> None:
        """A message was heard. Again it changes nothing."""
        self._forget(now)
        if number in self._lives.get(life, {}):
            return
        self._lives.setdefault(life, {})[number] = data
        self._order.append((now, life, number))
        self._bytes += len(data)
        self._forget(now)

    def _forget(self, now: float) -> None:
        while self._order and (self._bytes > self._most or now - self._order[0][0] > LIVES_AGE_S):
            _, life, number = self._order.popleft()
            self._bytes -= len(self._lives[life].pop(number))
            if not self._lives[life]:
                del self._lives[life]

    def after(self, life: str, number: int = -1) -> dict[int, bytes]:
        """Those of a life behind that one, in order."""
        known = self._lives.get(life, {})
        return {each: known[each] for each in sorted(known) if each > number}

    def last(self, life: str) -> int:
        """The last of a life; -1: there is none."""
        return max(self._lives.get(life, ()), default=-1)
