"""One chunk of the pool: its memory, how that is made and given back, and its life (the table ``CHUNK``)."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from sllm_loaderd import huge_pages
from sllm_loaderd.client import memory
from sllm_loaderd.sealed import adopt_sealed, create_sealed
from sllm_runtime.protocol.states import check

log = logging.getLogger(__name__)

MEMFD_NAME: Final = "sllm-chunk"


class ChunkState(StrEnum):
    """Where a chunk is in its life."""

    FREE = "free"  # in the pool; ``prefaulted`` says whether its pages are there
    USED = "used"  # belongs to a model
    RETIRING = "retiring"  # its model is gone, a sandbox that had it is not
    CLOSED = "closed"


C = ChunkState
CHUNK: Final[dict[ChunkState, frozenset[ChunkState]]] = {
    C.FREE: frozenset({C.USED, C.CLOSED}),
    C.USED: frozenset({C.FREE, C.RETIRING, C.CLOSED}),
    C.RETIRING: frozenset({C.FREE, C.CLOSED}),
    C.CLOSED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Chunk:
    """One memfd of ``size`` bytes. ``view`` is this process's mapping, writable but for what was ``adopted``.

    ``id`` (its inode) names it in every process for as long as it lives. ``dirty``: bytes from the start that are not
    zero. ``lasting``: others may have it after its model; what is adopted or small goes with that.
    """

    fd: int
    address: int
    view: memoryview
    id: int
    adopted: bool = False
    lasting: bool = True
    state: ChunkState = ChunkState.FREE
    prefaulted: bool = False
    pinned: bool = False
    dirty: int = 0
    holders: set[str] = field(default_factory=set)

    @property
    def size(self) -> int:
        """Bytes of memory."""
        return len(self.view)

    def move(self, state: ChunkState) -> None:
        """Go to ``state``, if the table allows it."""
        self.state = check(CHUNK, self.state, state)

    def zero_tail(self, used: int) -> None:
        """Nothing of the chunk's last model may be seen behind ``used`` bytes of the next."""
        if self.dirty > used:
            self.view[used : self.dirty] = bytes(self.dirty - used)
        self.dirty = used


def create_chunk(size: int, *, huge: bool, lasting: bool) -> Chunk:
    """A sealed memfd of ``size`` bytes without pages. ``huge``: of 2 MiB, where they fit. Raises ``OSError``."""
    fd, address = create_sealed(MEMFD_NAME, size, huge=huge and not size % memory.HUGE_PAGE)
    return Chunk(fd, address, memory.view(address, size), os.fstat(fd).st_ino, lasting=lasting)


def fault(chunk: Chunk, *, huge: bool, pause: Callable[[], None] = lambda: None) -> None:
    """Give it its pages, now. Where memory is in pieces a fault takes small ones in place of a ``huge`` one; here there
    is time to have others moved for it (Linux 6.1), but only where that has to be: the kernel waits for every core
    then, 45 ms, and whoever maps something in this process waits for the kernel. For the same reason a little is
    faulted at a time: memory that a virtual machine never had takes its host some 2 ms for each MiB. ``pause``, before
    each: returns when that may go on."""
    given = 0
    try:
        for start in range(0, chunk.size, memory.HUGE_PAGE):
            pause()
            before = huge_pages.taken() if huge else 0
            nbytes = min(memory.HUGE_PAGE, chunk.size - start)
            memory.advise(chunk.address + start, nbytes, memory.MADV_POPULATE_WRITE)
            given += huge_pages.taken() - before if huge else 0
        if huge and given < chunk.size:
            pause()
            memory.advise(chunk.address, chunk.size, memory.MADV_COLLAPSE)
    except OSError as error:  # short of memory: the chunk serves as it is, its pages come one by one
        log.warning("pre-faulting: %s", error)


def adopt_chunk(fd: int, size: int) -> Chunk:
    """The chunk of an earlier loaderd behind ``fd``, which is duplicated; it can only be read. Raises ``OSError``."""
    kept, address = adopt_sealed(fd, size)
    view, id = memory.view(address, size), os.fstat(kept).st_ino
    return Chunk(kept, address, view, id, adopted=True, lasting=False, state=ChunkState.USED)


def close_chunk(chunk: Chunk) -> None:
    """Its memory goes, as soon as no sandbox has it either."""
    size = chunk.size
    chunk.view.release()
    memory.unmap(chunk.address, size)
    os.close(chunk.fd)
    chunk.move(ChunkState.CLOSED)
