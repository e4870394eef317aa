"""What of this gateway's log was told to the others and is not stored yet. No I/O."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from sllm_runtime.platform.outbox import encode
from sllm_runtime.protocol.limits import MIB
from sllm_runtime.protocol.lives import Log

MOST: Final = 8 * MIB
"""Bytes that wait; beyond that all of them are given up."""


class Backlog:
    """Messages of one life, numbered in the order in which they were told; a number is never used again."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._next = 0
        self.gap = False
        """So much waited that it was given up: what is told from now on is not enough."""

    def add(self, log: Log) -> tuple[int, bytes]:
        """Its number, and how it travels. Raises ``ProtocolError`` if no message can be so large; it does not wait
        then, since nothing behind it would ever be stored."""
        data = encode(log, "a life's log")
        if self._bytes > self._most:
            self.clear()
            self.gap = True
        number = self._next
        self._next += 1
        self._waiting.append((number, data))
        self._bytes += len(data)
        return number, data

    @property
    def waiting(self) -> Iterable[tuple[int, bytes]]:
        """All of them, in order."""
        return self._waiting

    @property
    def first(self) -> tuple[int, bytes] | None:
        """The next to be stored."""
        return self._waiting[0] if self._waiting else None

    def stored(self, number: int) -> None:
        """That one is, unless it was given up meanwhile."""
        if self._waiting and self._waiting[0][0] == number:
            self._bytes -= len(self._waiting.popleft()[1])

    def clear(self) -> None:
        """Nothing of it is to be stored any more: all that is open is told anew."""
        self._waiting.clear()
        self._bytes = 0
        self.gap = False
