"""The chunk pool: memfds of one size, pre-faulted in the background, sealed, mapped writable only here.

A chunk that a sandbox has been given may be mapped there for as long as
any of its processes lives, so it is used again only after all of its holders are dead. A chunk of an earlier
loaderd (``adopt``) can only be read, since its seal refuses a new writable mapping: it is closed where others are
freed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Protocol

from sllm_loaderd.chunk import Chunk, ChunkState
from sllm_loaderd.client import memory
from sllm_loaderd.sealed import create_sealed, is_sealed
from sllm_runtime.protocol.errors import Conflict, PoolExhausted, Unavailable
from sllm_runtime.protocol.loader import PoolStatus

log = logging.getLogger(__name__)

F_ADD_SEALS: Final = 1033
MEMFD_NAME: Final = "sllm-chunk"
_FAULT_DEADLINE_S: Final = 5.0
_PREFAULT_NICE: Final = 10


class Pinner(Protocol):
    """Whoever wants to know host memory before it is copied from: the devices of this node."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin it. Raises ``Unavailable``."""

    def unregister(self, address: int) -> None:
        """Unpin it, before it is unmapped."""


class ChunkPool:
    """At most ``limit`` bytes of chunks. Thread-safe. ``prefault`` bytes are kept ready in the background.

    ``huge``: pages of 2 MiB where the kernel gives them. ``pinner`` is told chunks that devices will copy from.

    Who allocates makes room first (``shortage``); the pool itself does not know what a model is.
    """

    def __init__(
        self, chunk_bytes: int, limit: int, prefault: int, *, huge: bool = False, pinner: Pinner | None = None
    ) -> None:
        self.chunk_bytes = chunk_bytes
        self._huge = huge and chunk_bytes % memory.HUGE_PAGE == 0
        self._pinner = pinner
        self._pinning = threading.Lock()
        self._most = max(limit // chunk_bytes, 1)
        self._ahead = min(-(-prefault // chunk_bytes), self._most)
        self._chunks: set[Chunk] = set()
        self._free: list[Chunk] = []
        self._faulting = 0
        self._changed = threading.Condition()
        self._closing = False
        self.on_freed: Callable[[list[int]], None] = lambda ids: None
        """Called in the thread that frees, with the ids of chunks that hold nothing of a model any more."""
        self._prefaulter = threading.Thread(target=self._prefault, name="sllm-prefault", daemon=True)
        self._prefaulter.start()

    def shortage(self, count: int) -> int:
        """Chunks that would have to be freed before ``count`` can be allocated; 0 if there is room."""
        with self._changed:
            return self._shortage(count)

    def allocate(self, count: int) -> list[Chunk]:
        """``count`` chunks, pre-faulted ones first. Raises ``PoolExhausted``, taking none, if there are fewer."""
        with self._changed:
            # A chunk that is being pre-faulted is free in all but name; it comes back within milliseconds.
            self._changed.wait_for(lambda: self._shortage(count) or count <= self._at_hand, timeout=_FAULT_DEADLINE_S)
            if missing := self._shortage(count) or max(count - self._at_hand, 0):
                raise PoolExhausted(
                    f"{count} chunks of {self.chunk_bytes} bytes are needed, {missing} more than are free",
                    retry_after_s=1.0,
                )
            self._free.sort(key=lambda chunk: chunk.prefaulted)
            taken = [self._free.pop() for _ in range(min(count, len(self._free)))]
            try:
                while len(taken) < count:
                    taken.append(self._create())
            except OSError:  # short of descriptors or memory: none is taken
                self._free.extend(taken)
                raise
            for chunk in taken:
                chunk.move(ChunkState.USED)
            self._changed.notify_all()
            return taken

    @property
    def _at_hand(self) -> int:
        return self._most - len(self._chunks) + len(self._free)

    def _shortage(self, count: int) -> int:
        return max(count - self._at_hand - self._faulting, 0)

    def adopt(self, fd: int) -> tuple[Chunk, bool]:
        """A chunk of an earlier loaderd, in use from here on, or the one that is here already; and whether it is new.

        ``fd`` is duplicated. It counts against the limit, which it may exceed: the memory is taken as it is. Raises
        ``Conflict`` for what is no chunk of this pool's size and seals.
        """
        status = os.fstat(fd)
        with self._changed:
            known = next((chunk for chunk in self._chunks if chunk.id == status.st_ino), None)
            if known is not None:
                return known, False
            if status.st_size != self.chunk_bytes or not is_sealed(fd):
                raise Conflict(f"a descriptor is no chunk of {self.chunk_bytes} bytes with the seals of one")
            while len(self._chunks) >= self._most and self._free:
                self._close(self._free.pop())
            kept = os.dup(fd)
            try:
                address = memory.map_readable(kept, self.chunk_bytes)
            except OSError:
                os.close(kept)
                raise
            view = memory.view(address, self.chunk_bytes)
            chunk = Chunk(kept, address, view, status.st_ino, adopted=True, state=ChunkState.USED)
            self._chunks.add(chunk)
            return chunk, True

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
        if self._pinner is None or chunk.adopted:
            return
        with self._pinning:
            if not chunk.pinned:
                try:
                    self._pinner.register(chunk.address, self.chunk_bytes)
                    chunk.pinned = True
                except Unavailable as error:
                    log.warning("chunks are copied to devices without being pinned: %s", error)
                    self._pinner = None

    def inodes_of(self, holder: str) -> set[int]:
        """Inodes of the chunks that ``holder`` was given: what /proc calls them."""
        with self._changed:
            return {chunk.id for chunk in self._chunks if holder in chunk.holders}

    def status(self, reserved: int = 0) -> PoolStatus:
        """Bytes by state."""
        with self._changed:
            states = [chunk.state for chunk in self._chunks]
            size = self.chunk_bytes
            return PoolStatus(
                chunk_bytes=size,
                limit=self._most * size,
                free=max(self._at_hand + self._faulting, 0) * size,
                prefaulted=sum(chunk.prefaulted for chunk in self._free) * size,
                used=states.count(ChunkState.USED) * size,
                held=sum(bool(chunk.holders) for chunk in self._chunks if chunk.state is ChunkState.USED) * size,
                retiring=states.count(ChunkState.RETIRING) * size,
                reserved=reserved,
                huge_pages=self._huge,
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
        """Its memory goes, as soon as no sandbox has it either."""
        self._chunks.discard(chunk)
        if chunk.pinned and self._pinner is not None:
            self._pinner.unregister(chunk.address)
        chunk.view.release()
        memory.unmap(chunk.address, self.chunk_bytes)
        os.close(chunk.fd)
        chunk.move(ChunkState.CLOSED)

    def _put_back(self, chunk: Chunk) -> None:
        if chunk.adopted:
            self._close(chunk)
            return
        chunk.move(ChunkState.FREE)
        chunk.prefaulted = chunk.prefaulted or chunk.dirty == self.chunk_bytes
        self._free.append(chunk)

    def _create(self) -> Chunk:
        fd, address = create_sealed(MEMFD_NAME, self.chunk_bytes, huge=self._huge)
        chunk = Chunk(fd, address, memory.view(address, self.chunk_bytes), os.fstat(fd).st_ino)
        self._chunks.add(chunk)
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
            try:
                memory.advise(chunk.address, self.chunk_bytes, memory.MADV_POPULATE_WRITE)
            except OSError as error:  # short of memory: the chunk serves as it is, its pages come one by one
                log.warning("pre-faulting: %s", error)
            self.pin(chunk)
            with self._changed:
                self._faulting -= 1
                chunk.prefaulted = True
                self._free.append(chunk)
                self._changed.notify_all()

    def _next_cold(self) -> Chunk | None:
        """A chunk to pre-fault, taken out of the free ones meanwhile; None at the end."""
        with self._changed:
            while not self._closing:
                ready = sum(chunk.prefaulted for chunk in self._free)
                cold = next((chunk for chunk in self._free if not chunk.prefaulted), None)
                if ready < self._ahead and cold is not None:
                    self._free.remove(cold)
                    self._faulting += 1
                    return cold
                if ready < self._ahead and len(self._chunks) < self._most and (made := self._try_create()) is not None:
                    self._faulting += 1
                    return made
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
