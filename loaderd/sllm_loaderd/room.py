"""Room in the pool: what is pinned and reserved, whom to evict for whom, and the words when there is none."""

from __future__ import annotations

from collections.abc import Mapping

from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.resident import Key, Resident, victims, why_kept
from sllm_runtime.protocol.checkpoint import chunk_count
from sllm_runtime.protocol.errors import PoolExhausted


class Room:
    """Decides over ``residents``, which it does not change: who asks drops those that it names."""

    def __init__(self, pool: ChunkPool, residents: Mapping[Key, Resident]) -> None:
        self._pool = pool
        self._residents = residents
        self._reserved: dict[str, int] = {}
        self.pinned: set[str] = set()

    def victims(self, nbytes: int, digest: str) -> list[Resident]:
        """Whom to evict, least recently used first, so that ``nbytes`` are free for ``digest``.

        Raises ``PoolExhausted`` if that is not enough.
        """
        if nbytes <= 0:
            return []
        chosen, short = self._choose(nbytes, digest)
        if short:
            raise self._exhausted(nbytes, digest)
        return chosen

    def available(self, count: int, size: int, digest: str) -> int:
        """How many of ``count`` further chunks of ``size`` a model could have now, others being evicted for them."""
        return max(count - chunk_count(self._choose(count * size, digest)[1], size), 0)

    def reserve(self, digest: str, nbytes: int) -> list[Resident]:
        """Keep room for ``nbytes`` of a model: whom to evict now; 0 ends it. Raises ``PoolExhausted``."""
        before = self._reserved.pop(digest, 0)
        if not nbytes:
            return []
        try:
            chosen = self.victims(self._whole(nbytes) - self._used_by(digest), digest)
        except PoolExhausted:
            if before:
                self._reserved[digest] = before
            raise
        self._reserved[digest] = nbytes
        return chosen

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations."""
        return sum(self._reserved.values())

    def _choose(self, nbytes: int, digest: str) -> tuple[list[Resident], int]:
        shortage = self._pool.shortage(nbytes + self._reserved_by_others(digest))
        return victims(self._residents.values(), shortage, {digest, *self.pinned})

    def _whole(self, nbytes: int) -> int:
        """Bytes of the chunks that ``nbytes`` take."""
        return chunk_count(nbytes, self._pool.chunk_bytes) * self._pool.chunk_bytes

    def _used_by(self, digest: str) -> int:
        return sum(resident.memory for key, resident in self._residents.items() if key[0] == digest)

    def _reserved_by_others(self, digest: str) -> int:
        """Bytes that are kept free for other models."""
        return sum(
            max(self._whole(nbytes) - self._used_by(other), 0)
            for other, nbytes in self._reserved.items()
            if other != digest
        )

    def _exhausted(self, nbytes: int, digest: str) -> PoolExhausted:
        status = self._pool.status()
        kept = [
            f"{key[0][:19]}/{key[1]} {resident.memory} ({why_kept(resident, self.pinned)})"
            for key, resident in self._residents.items()
            if key[0] in self.pinned or not resident.evictable
        ]
        kept += [f"retiring {status.retiring}"] if status.retiring else []
        kept += [f"reserved {others}"] if (others := self._reserved_by_others(digest)) else []
        return PoolExhausted(
            f"{digest[:19]} needs {nbytes} bytes of the pool of {status.limit}; the rest is held by:"
            f" {', '.join(kept) or 'nothing, the pool is too small'}. Stop instances, or raise --pool-bytes",
            field="pool",
            retry_after_s=1.0,
        )
