"""What the SSD tier holds and what has to go: decisions without I/O."""

from __future__ import annotations

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

    @property
    def stays(self) -> int:
        """Bytes of copies that make room for nothing."""
        return sum(copy.nbytes for copy in self.copies.values() if copy.key[0] in self.pinned or copy.readers)

    def victims(self, nbytes: int, *, wanted: bool = False) -> list[Copy] | None:
        """Copies to remove before ``nbytes`` more are within the limit, as ``to_free``."""
        return self.to_free(self.used + nbytes - self.limit, wanted=wanted)

    def to_free(self, nbytes: int, *, wanted: bool) -> list[Copy] | None:
        """Copies to remove to have ``nbytes`` back, least recently used first; None: there are not as many.

        Models that are pinned and copies that are being read stay; those that are kept go last, and only for what is
        ``wanted`` here.
        """
        chosen: list[Copy] = []
        for copy in sorted(self.copies.values(), key=lambda copy: (copy.key[0] in self.kept, copy.used_at, copy.key)):
            if nbytes <= 0:
                break
            stays = copy.key[0] in self.pinned or copy.readers or (copy.key[0] in self.kept and not wanted)
            if not stays:
                chosen.append(copy)
                nbytes -= copy.nbytes
        return chosen if nbytes <= 0 else None
