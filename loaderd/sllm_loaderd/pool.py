"""The chunk pool: memfds of one size, pre-faulted in the background, sealed, mapped writable only here.

A chunk that a sandbox has been given may be mapped there for as long as
any of its processes lives, so it is used again only after all of its holders are dead. A chunk of an earlier
loaderd (``adopt``) can only be read, since its seal refuses a new writable mapping: it is closed where others are
freed. So is a small one, made to measure for a partition that needs less than half a chunk (a LoRA adapter).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from sllm_loaderd.chunk import Chunk, ChunkState, adopt_chunk, close_chunk, create_chunk, fault
from sllm_loaderd.client import memory
from sllm_loaderd.pinning import Pinner, Pinning
from sllm_loaderd.sealed import is_sealed
from sllm_runtime.protocol.errors import Conflict, PoolExhausted
from sllm_runtime.protocol.loader import PoolStatus

log = logging.getLogger(__name__)

F_ADD_SEALS: Final = 1033
_FAULT_DEADLINE_S: Final = 5.0
_PREFAULT_NICE: Final = 19
QUIET_S: Final = 0.5
"""Since a load has begun, until chunks get their pages ahead. On few cores that takes time from the very start that is
under way, as to refill a pool of warm sandboxes does: of a start from the SSD on two cores it had half."""
LONGEST_S: Final = 3.0
"""Where loads begin all the while, chunks get theirs from then on all the same, until there are enough."""


class ChunkPool:
    """At most ``limit`` bytes of chunks. Thread-safe. ``prefault`` bytes are kept ready in the background.

    ``huge``: pages of 2 MiB where the kernel gives them. ``pinner`` is told chunks that devices will copy from.

    Who allocates makes room first (``shortage``); the pool itself does not know what a model is.
    """

    def __init__(
        self, chunk_bytes: int, limit: int, prefault: int, *, huge: bool = False, pinner: Pinner | None = None
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self.huge_pages: Final = huge and chunk_bytes % memory.HUGE_PAGE == 0
        """Whether chunks are made of pages of 2 MiB, as far as the kernel has them."""
        self._pinning = Pinning(pinner)
        self._limit = max(limit // chunk_bytes, 1) * chunk_bytes
        self._ahead = 0
        self._taken = 0
        """Bytes of all chunks."""
        self._chunks: set[Chunk] = set()
        self._free: list[Chunk] = []
        self._faulting = 0
        self._awaited = 0
        """Loads that wait for a chunk which gets its pages."""
        self._quiet_until = 0.0
        """``time.monotonic``."""
        self._lacking_since: float | None = None
        """When a load began for the first time since as many had their pages as shall."""
        self._changed = threading.Condition()
        self._closing = False
        self.on_freed: Callable[[list[int]], None] = lambda ids: None
        """Called in the thread that frees, with the ids of chunks that hold nothing of a model any more."""
        self._prefaulter = threading.Thread(target=self._prefault, name="sllm-prefault", daemon=True)
        self.keep_ready(prefault)
        self._prefaulter.start()

    @property
    def limit(self) -> int:
        """Most bytes of chunks."""
        return self._limit

    def keep_ready(self, nbytes: int) -> None:
        """From now on ``nbytes`` of free chunks get their pages ahead; those that have theirs keep them."""
        with self._changed:
            self._ahead = min(-(-nbytes // self.chunk_bytes), self._limit // self.chunk_bytes)
            self._changed.notify_all()

    def size_for(self, nbytes: int) -> int:
        """Bytes that a chunk takes in which ``nbytes`` are wanted: a whole one, or what a small partition needs.

        Above a few huge pages' worth it is made of these: a fault for each page of 4 KiB would cost more than the read.
        """
        unit = memory.HUGE_PAGE if self.huge_pages and nbytes > memory.HUGE_PAGE // 2 else 1
        small = -(-nbytes // unit) * unit
        return small if 0 < 2 * small < self.chunk_bytes else self.chunk_bytes

    def shortage(self, nbytes: int) -> int:
        """Bytes that would have to be freed before ``nbytes`` can be allocated; 0 if there is room."""
        with self._changed:
            return self._shortage(nbytes)

    def allocate(self, count: int, size: int | None = None) -> list[Chunk]:
        """``count`` chunks of ``size`` (of ``size_for``; None: whole ones, pre-faulted ones first).

        Raises ``PoolExhausted``, taking none, if there is no room for all.
        """
        size = self.chunk_bytes if size is None else size
        need = count * size
        with self._changed:
            # A chunk that is being pre-faulted is free in all but name; it comes back within milliseconds.
            if not self._shortage(need) and need > self._at_hand:
                self._await_faults(need)
            if missing := self._shortage(need) or max(need - self._at_hand, 0):
                raise PoolExhausted(
                    f"{count} chunks of {size} bytes are needed, {missing} bytes more than are free",
                    retry_after_s=1.0,
                )
            taken = self._take_whole(count) if size == self.chunk_bytes else self._make_small(count, size)
            for chunk in taken:
                chunk.move(ChunkState.USED)
            self._postpone(time.monotonic())
            self._changed.notify_all()
            return taken

    def _await_faults(self, need: int) -> None:
        self._awaited += 1
        self._changed.notify_all()
        try:
            self._changed.wait_for(lambda: self._shortage(need) or need <= self._at_hand, timeout=_FAULT_DEADLINE_S)
        finally:
            self._awaited -= 1

    def _postpone(self, now: float) -> None:
        """A load begins ``now``, also one of what is in memory: chunks get their pages in a while."""
        if self._lacking_since is None:
            self._lacking_since = now
        self._quiet_until = min(now + QUIET_S, self._lacking_since + LONGEST_S)

    def _take_whole(self, count: int) -> list[Chunk]:
        self._free.sort(key=lambda chunk: (chunk.prefaulted, chunk.dirty))
        taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
        try:
            while len(taken) < count:
                taken.append(self._create())
        except OSError:  # short of descriptors or memory: none is taken
            self._free.extend(taken)
            raise
        return taken

    def _make_small(self, count: int, size: int) -> list[Chunk]:
        """New ones of their own size; idle whole ones go for them where the limit says so."""
        made: list[Chunk] = []
        try:
            for _ in range(count):
                self._close_free(size)
                made.append(self._create(size))
        except OSError:
            for chunk in made:
                self._close(chunk)
            raise
        return made

    def _close_free(self, size: int) -> None:
        """Give up free chunks, cold ones first, until ``size`` bytes are within the limit."""
        while self._taken + size > self._limit and self._free:
            self._free.sort(key=lambda chunk: chunk.prefaulted)
            self._close(self._free.pop(0))

    @property
    def _at_hand(self) -> int:
        """Bytes that can be allocated."""
        return self._limit - self._taken + len(self._free) * self.chunk_bytes

    def _shortage(self, nbytes: int) -> int:
        return max(nbytes - self._at_hand - self._faulting * self.chunk_bytes, 0)

    def adopt(self, fd: int) -> tuple[Chunk, bool]:
        """A chunk of an earlier loaderd, in use from here on, or the one that is here already; and whether it is new.

        ``fd`` is duplicated. It counts against the limit, which it may exceed: the memory is taken as it is. Raises
        ``Conflict`` for what is no chunk of this pool, by its size and seals.
        """
        status = os.fstat(fd)
        with self._changed:
            known = next((chunk for chunk in self._chunks if chunk.id == status.st_ino), None)
            if known is not None:
                return known, False
            size = status.st_size
            if not (size == self.chunk_bytes or 0 < 2 * size < self.chunk_bytes) or not is_sealed(fd):
                raise Conflict(f"a descriptor is no chunk of {self.chunk_bytes} bytes with the seals of one")
            self._close_free(size)
            return self._add(adopt_chunk(fd, size)), True

    def free(self, chunks: Iterable[Chunk]) -> None:
        """Give chunks back; one that a living sandbox has had retires first."""
        with self._changed:
            freed = []
            for chunk in chunks:
                if chunk.holders:
                    chunk.move(ChunkState.RETIRING)
                else:
                    freed.append(chunk.id)
                    self._put_back(chunk)
        self.on_freed(freed)

    def hold(self, chunks: Sequence[Chunk], holder: str) -> None:
        """``holder`` is being given these chunks."""
        with self._changed:
            for chunk in chunks:
                chunk.holders.add(holder)

    def forget(self, holder: str) -> int:
        """``holder`` is dead. Returns the number of retired chunks that became free by it."""
        with self._changed:
            freed = []
            for chunk in [chunk for chunk in self._chunks if holder in chunk.holders]:
                chunk.holders.discard(holder)
                if chunk.state is ChunkState.RETIRING and not chunk.holders:
                    freed.append(chunk.id)
                    self._put_back(chunk)
        self.on_freed(freed)
        return len(freed)

    def pin(self, chunk: Chunk) -> None:
        """Have the devices know a chunk before they copy from it. What cannot be pinned is copied more slowly."""
        self._pinning.pin(chunk)

    def inodes_of(self, holder: str) -> set[int]:
        """Inodes of the chunks that ``holder`` was given: what /proc calls them."""
        with self._changed:
            return {chunk.id for chunk in self._chunks if holder in chunk.holders}

    def status(self, reserved: int = 0) -> PoolStatus:
        """Bytes by state."""
        with self._changed:
            used = [chunk for chunk in self._chunks if chunk.state is ChunkState.USED]
            return PoolStatus(
                chunk_bytes=self.chunk_bytes,
                limit=self._limit,
                free=max(self._at_hand + self._faulting * self.chunk_bytes, 0),
                prefaulted=sum(chunk.prefaulted for chunk in self._free) * self.chunk_bytes,
                used=sum(chunk.size for chunk in used),
                held=sum(chunk.size for chunk in used if chunk.holders),
                retiring=sum(chunk.size for chunk in self._chunks if chunk.state is ChunkState.RETIRING),
                reserved=reserved,
                huge_pages=self.huge_pages,
            )

    def close(self) -> None:
        """Stop pre-faulting and give back all memory. No chunk may be in the hands of an I/O thread any more."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._prefaulter.join()
        self._free.clear()
        for chunk in list(self._chunks):
            self._close(chunk)

    def _close(self, chunk: Chunk) -> None:
        self._chunks.discard(chunk)
        self._taken -= chunk.size
        self._pinning.unpin(chunk)
        close_chunk(chunk)

    def _put_back(self, chunk: Chunk) -> None:
        if not chunk.lasting:
            self._close(chunk)
            return
        chunk.move(ChunkState.FREE)
        if not self.huge_pages:  # pages that came with a read may be small ones: whoever makes them ahead looks again
            chunk.prefaulted = chunk.prefaulted or chunk.dirty == self.chunk_bytes
        self._free.append(chunk)

    def _create(self, size: int | None = None) -> Chunk:
        """A whole chunk, or a small one of ``size`` bytes."""
        return self._add(create_chunk(size or self.chunk_bytes, huge=self.huge_pages, lasting=size is None))

    def _add(self, chunk: Chunk) -> Chunk:
        self._chunks.add(chunk)
        self._taken += chunk.size
        return chunk

    def _try_create(self) -> Chunk | None:
        try:
            return self._create()
        except OSError as error:
            log.warning("no chunk can be made ahead: %s", error)
            return None

    def _prefault(self) -> None:
        """Keep the free chunks that have their pages at the number wanted. A thread of its own, behind all others."""
        with contextlib.suppress(OSError):  # not allowed everywhere, and only a courtesy
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _PREFAULT_NICE)
        while (chunk := self._next_cold()) is not None:
            fault(chunk, huge=self.huge_pages, pause=self._pause)
            self.pin(chunk)
            with self._changed:
                self._faulting -= 1
                chunk.prefaulted = True
                self._free.append(chunk)
                self._changed.notify_all()

    def _pause(self) -> None:
        """In the middle of a chunk: a load that begins does not share the cores with the rest of it, unless it waits
        for that."""
        with self._changed:
            while not (self._closing or self._awaited) and (left := self._quiet_until - time.monotonic()) > 0:
                self._changed.wait(timeout=left)

    def _next_cold(self) -> Chunk | None:
        """A chunk to pre-fault, taken out of the free ones meanwhile; None at the end."""
        with self._changed:
            while not self._closing:
                if (left := self._quiet_until - time.monotonic()) > 0:
                    self._changed.wait(timeout=left)
                    continue
                ready = sum(chunk.prefaulted for chunk in self._free)
                cold = next((chunk for chunk in self._free if not chunk.prefaulted), None)
                if ready < self._ahead and cold is not None:
                    self._free.remove(cold)
                    self._faulting += 1
                    return cold
                room = self._taken + self.chunk_bytes <= self._limit
                if ready < self._ahead and room and (made := self._try_create()) is not None:
                    self._faulting += 1
                    return made
                self._lacking_since = None
                # Woken by every allocation and by close; the time-out is for a wake-up that was missed, or for
                # descriptors or memory that were short.
                self._changed.wait(timeout=60)
            return None

    def wait_prefaulted(self, nbytes: int, timeout: float) -> bool:
        """Whether ``nbytes`` of free chunks have their pages within ``timeout`` seconds."""
        wanted = -(-nbytes // self.chunk_bytes)
        with self._changed:
            return self._changed.wait_for(
                lambda: sum(chunk.prefaulted for chunk in self._free) >= wanted, timeout=timeout
            )
