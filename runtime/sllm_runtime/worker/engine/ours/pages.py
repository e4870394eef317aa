"""Pages of the KV cache: who holds which, which may be found again by its content. Pure bookkeeping, no tensors.

A page holds ``PAGE`` positions of one sequence, for every layer. A full page has a hash that covers its tokens and all
before them; a page that nobody holds is free, or cached under its hash until its room is needed (least recently used
first). Low numbers are given out first, so that the pages in use lie close together.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final

PAGE: Final = 128
"""Positions of a page, and the fixed split of attention (``attention``)."""
ROOT: Final = b""
"""The hash before the first page."""


def pages_for(tokens: int) -> int:
    """Pages that ``tokens`` positions take."""
    return -(-tokens // PAGE)


def page_hash(before: bytes, tokens: Sequence[int]) -> bytes:
    """Identity of a full page whose predecessor has the hash ``before``."""
    return hashlib.blake2b(before + array("q", tokens).tobytes(), digest_size=16).digest()


class Pages:
    """``total`` pages, each free, held (by one sequence or several that share a prefix) or cached."""

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total))
        self._holders = [0] * total
        self._hashes: list[bytes | None] = [None] * total
        self._by_hash: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._fresh: list[int] = []

    @property
    def available(self) -> int:
        """Pages that ``take`` can still give out."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages nobody holds whose content is kept."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Pages that sequences hold, shared ones counted once."""
        return self.total - self.available

    def take(self) -> int | None:
        """A page of one's own with no content; None when all are held."""
        if self._free:
            page = heapq.heappop(self._free)
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
        else:
            return None
        self._holders[page] = 1
        self._fresh.append(page)
        return page

    def fresh(self) -> list[int]:
        """Pages taken since the last time: they hold what somebody else left there."""
        found, self._fresh = self._fresh, []
        return found

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Hold and return the pages that are kept under ``keys``, up to the first that is not."""
        found: list[int] = []
        for key in keys:
            page = self._by_hash.get(key)
            if page is None:
                break
            self._hold(page)
            found.append(page)
        return found

    def keep(self, page: int, key: bytes) -> None:
        """``page`` is full and has the content ``key``; it may be found by it. The first such page wins."""
        if self._hashes[page] is None and key not in self._by_hash:
            self._hashes[page] = key
            self._by_hash[key] = page

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each. The last pages of a sequence are the first to be evicted."""
        for page in reversed(list(pages)):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if self._hashes[page] is None:
                    heapq.heappush(self._free, page)
                else:
                    self._cached[page] = None

    def drop_cached(self) -> None:
        """Forget all content that nobody holds."""
        for page in self._cached:
            self._forget(page)
            heapq.heappush(self._free, page)
        self._cached.clear()

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise ``AssertionError`` unless the page tables of all sequences and this bookkeeping agree."""
        holders = [0] * self.total
        for table in tables:
            for page in table:
                holders[page] += 1
        assert holders == self._holders, "page tables and holders differ"
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a page is free twice"
        assert not free & cached, "a page is free and cached"
        assert free | cached == {page for page in range(self.total) if not holders[page]}, "a page is lost"
        assert all(self._hashes[page] is None for page in free), "a free page is kept"
        assert all(self._hashes[page] == key for key, page in self._by_hash.items()), "a hash points elsewhere"

    def _hold(self, page: int) -> None:
        self._cached.pop(page, None)
        self._holders[page] += 1

    def _forget(self, page: int) -> None:
        key = self._hashes[page]
        if key is not None:
            del self._by_hash[key]
            self._hashes[page] = None
