"""What is in memory: which partitions, what stays, what is dropped, and what is said of it.

Lives in the daemon's event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.reader import close_all
from sllm_loaderd.resident import Key, Resident
from sllm_loaderd.room import Room
from sllm_runtime.protocol.errors import Conflict
from sllm_runtime.protocol.loader import ResidentStatus


class Residents:
    """The partitions of one pool. Not thread-safe: everything happens in one event loop."""

    def __init__(self, pool: ChunkPool) -> None:
        self._pool = pool
        self._residents: dict[Key, Resident] = {}
        self._room = Room(pool, self._residents)
        self._watchers: list[Callable[[], None]] = []

    def find(self, digest: str, rank: int) -> Resident | None:
        """A partition that is in memory or on its way."""
        return self._residents.get((digest, rank))

    def has(self, digest: str) -> bool:
        """Whether any part of a model is in memory or on its way."""
        return any(key[0] == digest for key in self._residents)

    def pin(self, digest: str, pinned: bool) -> None:
        """Keep a model in memory, or stop doing so."""
        (self._room.pinned.add if pinned else self._room.pinned.discard)(digest)

    def reserve(self, digest: str, nbytes: int) -> None:
        """Keep room for ``nbytes`` of a model, evicting others now; 0 ends it. Raises ``PoolExhausted``."""
        for resident in self._room.reserve(digest, nbytes):
            self._drop(resident)

    def ending(self, digest: str) -> bool:
        """Whether something of a model still runs that nobody waits for; copies for the SSD tier are given up.

        Raises ``Conflict`` while somebody loads it.
        """
        residents = [resident for resident in self._residents.values() if resident.key[0] == digest]
        if any(resident.jobs for resident in residents):
            raise Conflict(f"model {digest} is being loaded; cancel the load first", field="model")
        for resident in residents:
            if resident.write_back is not None:
                resident.write_back.stop()
        return any(resident.loading or resident.writing for resident in residents)

    def watch(self, changed: Callable[[], None]) -> None:
        """``changed`` is called once, when something that ran has ended."""
        self._watchers.append(changed)

    def _tell(self) -> None:
        watchers, self._watchers = self._watchers, []
        for changed in watchers:
            changed()

    def evict(self, digest: str) -> int:
        """Drop a model from memory; the number of its chunks. Raises ``Conflict`` while anything of it runs."""
        if self.ending(digest):
            raise Conflict(f"model {digest} is still being read or written; try again", field="model")
        return sum(self._drop(r) for r in list(self._residents.values()) if r.key[0] == digest)

    def forget(self, holder: str) -> None:
        """A sandbox is dead: what only it held can be used again."""
        self._pool.forget(holder)

    def hold(self, chunks: Sequence[Chunk], holder: str) -> None:
        """A sandbox is being given these chunks."""
        self._pool.hold(chunks, holder)

    def close(self) -> None:
        """No task runs any more: close sources, give up copies for the SSD tier."""
        for resident in self._residents.values():
            close_all(resident.sources)
            resident.sources = []
            if resident.write_back is not None:
                resident.write_back.stop()

    def _drop(self, resident: Resident) -> int:
        del self._residents[resident.key]
        if resident.write_back is not None:
            resident.write_back.stop()
        self._pool.free(resident.chunks.values())
        count = len(resident.chunks)
        resident.chunks.clear()
        return count

    def _make_room(self, nbytes: int, digest: str) -> None:
        """Evict until ``nbytes`` are free for ``digest``; or nothing at all. Raises ``PoolExhausted``."""
        for resident in self._room.victims(nbytes, digest):
            self._drop(resident)

    def spare(self, most: int, size: int, digest: str) -> list[Chunk]:
        """Chunks of ``size`` for bytes of ``digest`` that do not stay, the caller's until it frees them: as many of
        ``most`` as nobody has to leave for, or one. Raises ``PoolExhausted``."""
        count = next((n for n in range(most, 1, -1) if not self._pool.shortage(n * size)), 1)
        self._make_room(count * size, digest)
        return self._pool.allocate(count, size)

    def residents(self) -> tuple[Resident, ...]:
        """Every partition in memory or on its way there."""
        return tuple(self._residents.values())

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all reservations."""
        return self._room.reserved_bytes

    def resident_bytes(self, digest: str) -> int:
        """Bytes of a model that are in memory and checked."""
        return sum(status.nbytes for status in self.status() if status.model == digest)

    def status(self) -> list[ResidentStatus]:
        """Every partition in memory, least recently used first."""
        ordered = sorted(self._residents.values(), key=lambda resident: resident.used_at)
        return [
            ResidentStatus(
                model=resident.key[0],
                partition=resident.key[1],
                nbytes=sum(resident.nbytes_of(number) for number in resident.chunks if resident.there(number)),
                total=resident.nbytes,
                pinned=resident.key[0] in self._room.pinned,
                holders=tuple(sorted(resident.holders)),
                partitions=sum(part.nbytes > 0 for part in resident.model.index.partitions),
            )
            for resident in ordered
        ]
