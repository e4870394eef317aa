"""What the SSD tier holds and what has to go: decisions without I/O."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

Key = tuple[str, int]
"""(hex of the model's digest, rank)"""


@dataclass(slots=True)
class Copy:
    """A partition on the disk. ``used_at`` orders copies, ``readers`` are those who have it open."""

    key: Key
    nbytes: int
    used_at: int
    readers: int = 0


@dataclass(slots=True)
class Ledger:
    """Bytes of copies and of those being written, within ``limit``. Not thread-safe."""

    limit: int
    copies: dict[Key, Copy] = field(default_factory=dict)
    writing: dict[Key, int] = field(default_factory=dict)
    pinned: set[str] = field(default_factory=set)
    kept: frozenset[str] = frozenset()
    """Models that are to lie here, by the platform's placement."""

    @property
    def used(self) -> int:
        """Bytes that count against the limit."""
        return sum(copy.nbytes for copy in self.copies.values()) + sum(self.writing.values())

    def victims(self, nbytes: int, *, wanted: bool = False) -> list[Copy] | None:
        """Copies to remove before ``nbytes`` more are within the limit, least recently used first; None: impossible.

        Models that are pinned and copies that are being read stay; those that are kept go last, and only for what is
        ``wanted`` here.
        """
        excess = self.used + nbytes - self.limit
        chosen: list[Copy] = []
        for copy in self.evictable():
            if copy.key[0] in self.kept and not wanted:
                continue
            if excess <= 0:
                break
            chosen.append(copy)
            excess -= copy.nbytes
        return chosen if excess <= 0 else None

    def evictable(self) -> Iterable[Copy]:
        """Copies that may go, those that are kept last, else the least recently used first."""
        free = [c for c in self.copies.values() if c.key[0] not in self.pinned and not c.readers]
        return sorted(free, key=lambda copy: (copy.key[0] in self.kept, copy.used_at, copy.key))
