"""Where the bytes of a stored model's partitions come from on this node: its own disk, the SSD tier, peers, origins."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import msgspec

from sllm_loaderd.disk.local import LocalPartition
from sllm_loaderd.reader import ByteSource, ChunkSource, Segment, SegmentedPartition, close_all
from sllm_loaderd.sources import Entry, Source, SourceSettings, open_source
from sllm_loaderd.ssd.tier import SsdDirectory
from sllm_loaderd.verify import Checkpoint
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import ModelNotFound, SllmError, Unavailable
from sllm_runtime.protocol.loader import DISK, path_of

log = logging.getLogger(__name__)

_PEER: Final = "peer://"
_HUB: Final = "hf://"
_MOST_SOURCES: Final = 64
"""Sources whose connections are kept while nobody reads by them."""


class SourceRecord(msgspec.Struct, frozen=True):
    """What a source was when it was registered, and the model that came of it.

    ``entries``: the files of a source whose bytes stay where they are and are read from there by every load.
    """

    uri: str
    fingerprint: str
    digest: str
    entries: tuple[Entry, ...] = ()


class Origins:
    """The ways to a partition's bytes, and the connections that they need. Thread-safe; owns the sources."""

    def __init__(self, ssd: SsdDirectory, settings: SourceSettings) -> None:
        self._ssd = ssd
        self._settings = settings
        self._lock = threading.Lock()
        self._sources: dict[str, Source] = {}
        self._readers: Counter[Source] = Counter()
        """Objects that were opened for somebody and are not closed yet."""
        self._leaving = set[Source]()
        """Those that are forgotten and go with their last reader."""
        self._closed = False

    def open(
        self, checkpoint: Checkpoint, rank: int, records: Callable[[], Iterable[SourceRecord]], *, direct: bool = True
    ) -> list[ChunkSource]:
        """Best first: a file of the store, which has all; or else the SSD copy, peers, object stores.

        ``records`` gives the sources that are known. Nothing remote is asked before the first read. Raises
        ``ModelNotFound`` if there is no way at all, what the first one failed with where each that there is did.
        """
        nbytes = checkpoint.index.partition(rank).nbytes
        if (checkpoint.directory / partition_name(rank)).exists():
            return [LocalPartition(checkpoint.directory, rank, nbytes, direct=direct)]
        known = sorted(records(), key=lambda record: not record.uri.startswith(_PEER))
        ways: list[Callable[[], ChunkSource | None]] = [partial(self._ssd.open, checkpoint.digest, rank, nbytes)]
        ways += (partial(self._partition, checkpoint, rank, record) for record in known)
        found: list[ChunkSource] = []
        failure: SllmError | None = None
        for way in ways:
            try:
                source = way()
            except SllmError as error:  # another one may have it all
                log.warning("partition %d of %s: %s", rank, checkpoint.digest, error.message)
                failure = failure or error
            except BaseException:
                close_all(found)  # else what they read by would never be idle again
                raise
            else:
                found += () if source is None else (source,)
        if not found:
            raise failure or ModelNotFound(
                f"partition {rank} of {checkpoint.digest} is neither on this node nor at a source it knows; register"
                " the model again",
                field="model",
            )
        return found

    def _partition(self, checkpoint: Checkpoint, rank: int, record: SourceRecord) -> ChunkSource | None:
        """The partition as the source of ``record`` has it: one object, or the files that it is made of."""
        entries = {entry.name: entry for entry in record.entries}
        whole = entries.get(partition_name(rank))
        if whole is not None and whole.nbytes == checkpoint.index.partition(rank).nbytes:
            return self._lent(fixed(record), whole)
        wanted = [segment for segment in checkpoint.index.segments if segment.rank == rank]
        if not wanted or any(s.name not in entries or entries[s.name].nbytes != s.nbytes for s in wanted):
            return None
        segments = [Segment(self._lent(fixed(record), entries[s.name]), 0, s.offset, s.nbytes) for s in wanted]
        return SegmentedPartition(f"{record.uri} (partition {rank})", segments)

    def largest(self, records: Iterable[SourceRecord]) -> list[ByteSource]:
        """By the path of each store that loads read from: its largest object. Nothing is asked before the first read;
        other nodes are no store."""
        found: dict[str, tuple[Entry, str]] = {}
        for record in records:
            path = path_of(record.uri)
            if path == DISK or record.uri.startswith(_PEER) or not record.entries:
                continue
            entry = max(record.entries, key=lambda entry: entry.nbytes)
            if path not in found or entry.nbytes > found[path][0].nbytes:
                found[path] = entry, fixed(record)
        return [LazyObject(self._source(uri), entry) for entry, uri in found.values()]

    def forget(self, uri: str) -> None:
        """End the connections to a source, whose files are at ``uri`` (``fixed``). What reads a hub's commit reads on:
        it is what it was, wherever a branch is by now."""
        with self._lock:
            source = self._sources.pop(uri, None)
            if source is not None and source in self._readers and uri.startswith(_HUB):
                self._leaving.add(source)
                return
        if source is not None:
            source.close()

    def close(self) -> None:
        """End all connections and the reads that use them; later ones fail."""
        with self._lock:
            self._closed = True
            sources, self._sources = {*self._sources.values(), *self._leaving}, {}
            self._leaving.clear()
        for source in sources:
            source.close()

    def _lent(self, uri: str, entry: Entry) -> LazyObject:
        """An object of the source at ``uri``, which keeps its connections until that is closed."""
        source = self._source(uri, readers=1)
        return LazyObject(source, entry, lambda: self._given_back(source))

    def _given_back(self, source: Source) -> None:
        with self._lock:
            self._readers[source] -= 1
            if self._readers[source]:
                return
            del self._readers[source]
            if source not in self._leaving:
                return
            self._leaving.discard(source)
        source.close()

    def _source(self, uri: str, readers: int = 0) -> Source:
        """The source at ``uri``, opened once; of those that nobody reads by the least recently used go when there are
        too many."""
        with self._lock:
            if self._closed:
                raise Unavailable(f"{uri} is not read any more: this node's loader is stopping")
            source = self._sources.pop(uri, None) or open_source(uri, self._settings)
            self._sources[uri] = source
            if readers:
                self._readers[source] += readers
            idle = [each for each in self._sources if each != uri and self._sources[each] not in self._readers]
            gone = [self._sources.pop(each) for each in idle[: max(len(self._sources) - _MOST_SOURCES, 0)]]
        for old in gone:
            old.close()
        return source


def fixed(record: SourceRecord) -> str:
    """Where the files are that were registered: a hub's branch may be at another commit by now."""
    kind, _, commit = record.fingerprint.partition(":")
    name = record.uri.partition("@")[0].rstrip("/")
    return f"{name}@{commit}" if kind == "commit" and name.startswith(_HUB) else record.uri


def _nothing() -> None:
    """Nobody counts its readers."""


class LazyObject:
    """``ByteSource``: one object of a source, opened at its first read (which may have to resolve credentials)."""

    def __init__(self, source: Source, entry: Entry, closed: Callable[[], None] = _nothing) -> None:
        self.path = source.path
        self.nbytes = entry.nbytes
        self.name = f"{source.uri.rstrip('/')}/{entry.name}"
        self._source = source
        self._entry = entry
        self._lock = threading.Lock()
        self._opened: ByteSource | None = None
        self._closed = closed

    def read(self, view: memoryview, offset: int) -> str:
        """As ``ChunkSource.read``."""
        with self._lock:
            if self._opened is None:
                self._opened = self._source.open(self._entry)
        return self._opened.read(view, offset)

    def close(self) -> None:
        """The source keeps its connections for the next load."""
        if self._opened is not None:
            self._opened.close()
        closed, self._closed = self._closed, _nothing  # closed again it is not given back again
        closed()
