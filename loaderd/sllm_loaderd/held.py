"""What this node has in DRAM or on its SSD of a remote model, so that converting it fetches no byte a second time."""

from __future__ import annotations

import asyncio
import os
import threading
from functools import partial

from sllm_loaderd.origins import SourceRecord
from sllm_loaderd.peer.exports import Exports, Piece
from sllm_loaderd.reader import BUFFERED
from sllm_loaderd.residency import Residency
from sllm_loaderd.sources import Entry
from sllm_loaderd.sources.fetch import begin_fetch, place_of
from sllm_loaderd.store import ModelStore
from sllm_loaderd.verify import open_checkpoint
from sllm_runtime.protocol.checkpoint import CheckpointIndex, SegmentRecord, chunk_count, partition_name
from sllm_runtime.protocol.errors import ModelNotFound
from sllm_runtime.protocol.loader import DISK


def is_remote(uri: str) -> bool:
    """Whether the files of a source are not on this machine."""
    return "://" in uri and not uri.startswith("file://")


class Held:
    """Lives in the event loop; ``exports`` gives the bytes, in whatever tier they are."""

    def __init__(self, store: ModelStore, residency: Residency, exports: Exports) -> None:
        self._store = store
        self._residency = residency
        self._exports = exports

    async def loaded(self, record: SourceRecord, within_s: float) -> None:
        """Until all of a remote model is in memory or on the SSD tier, or ``within_s`` is over."""
        if not is_remote(record.uri):
            return
        index = (await asyncio.to_thread(open_checkpoint, self._store.directory(record.digest), record.digest)).index
        try:
            async with asyncio.timeout(within_s):
                while not all(self._whole(record.digest, index, part.rank) for part in index.partitions):
                    changed = asyncio.Event()
                    self._residency.watch(changed.set)
                    await changed.wait()
        except TimeoutError:
            return

    def _whole(self, digest: str, index: CheckpointIndex, rank: int) -> bool:
        resident = self._residency.find(digest, rank)
        count = chunk_count(index.partition(rank).nbytes, index.chunk_bytes)
        there = resident is not None and all(resident.there(number) for number in range(count))
        return there or self._store.ssd.holds(digest, rank)

    async def hand_over(self, record: SourceRecord) -> None:
        """Put what is held of a remote model's files where its conversion looks for what an earlier fetch brought."""
        if not is_remote(record.uri):
            return
        stop = threading.Event()
        working = asyncio.ensure_future(asyncio.to_thread(self._copy, record, stop))
        try:
            await asyncio.shield(working)
        except asyncio.CancelledError:
            stop.set()
            await asyncio.wait([working])
            raise

    def _copy(self, record: SourceRecord, stop: threading.Event) -> None:
        index = open_checkpoint(self._store.directory(record.digest), record.digest).index
        target = place_of(self._store.cache, record.uri, record.fingerprint)
        begin_fetch(_HeldSource(self._exports, record, index), record.entries, target, stop)


class _HeldSource:
    """The files of a model, made of its partitions."""

    def __init__(self, exports: Exports, record: SourceRecord, index: CheckpointIndex) -> None:
        self.uri = record.uri
        self._exports = exports
        self._digest = record.digest
        self._segments = {segment.name: segment for segment in index.segments}

    def open(self, entry: Entry) -> _HeldFile:
        """Raises ``ModelNotFound`` for what is no part of the partitions."""
        segment = self._segments.get(entry.name)
        if segment is None:
            raise ModelNotFound(f"{entry.name} is not among the weights of {self._digest}", field=entry.name)
        return _HeldFile(self._exports, self._digest, segment)

    def close(self) -> None:
        """Nothing is open between two reads."""


class _HeldFile:
    """``ByteSource``: one file, from where the node has its bytes now."""

    path = DISK

    def __init__(self, exports: Exports, digest: str, segment: SegmentRecord) -> None:
        self.name = segment.name
        self.nbytes = segment.nbytes
        self._read = partial(exports.pieces, digest, partition_name(segment.rank))
        self._start = segment.offset

    def read(self, view: memoryview, offset: int) -> str:
        """Raises ``ModelNotFound`` if it is not here any more."""
        with self._read(self._start + offset, len(view)) as pieces:
            at = 0
            for piece in pieces:
                self._fill(view[at : at + piece.nbytes], piece)
                at += piece.nbytes
        return BUFFERED

    def _fill(self, view: memoryview, piece: Piece) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(piece.fd, [view[done:]], piece.offset + done)
            if not count:
                raise ModelNotFound(f"{self.name} is not here whole any more", field=self.name)
            done += count

    def close(self) -> None:
        """Nothing is open between two reads."""
