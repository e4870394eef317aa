"""Bytes by offset: of one object (``ByteSource``), or of one partition (``ChunkSource``), maybe of many objects."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sllm_runtime.protocol.errors import InvalidCheckpoint, Unavailable

DIRECT: Final = "direct"
BUFFERED: Final = "buffered"
CACHED: Final = "cached"
"""Copied from the page cache, which says nothing of the path."""


class SourceClosed(Unavailable):
    """It was closed here, while it was read or opened: nothing is wrong with the way to it. On the wire
    ``unavailable``, as nobody else need know."""


class ChunkSource(Protocol):
    """Bytes of one partition by offset. Used by several I/O threads at once.

    ``path`` is the way the bytes come by (``disk``, ``s3 bucket``, ``http host``, ``peer node``): its queue and its
    bandwidth are measured apart. ``name`` is what an error message calls it.
    """

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    def read(self, view: memoryview, offset: int) -> str:
        """Fill ``view`` from ``offset`` on, whole, or raise a typed error naming object and offset. Blocks. How it was
        read: ``DIRECT``, ``BUFFERED``, ``CACHED``, empty for what is not local.

        A retryable error (``Unavailable``) or bytes that do not match send the chunk to the partition's next source.
        """

    def close(self) -> None:
        """Give back descriptors; called once, when no read is under way."""


class ByteSource(ChunkSource, Protocol):
    """Bytes of one object of ``nbytes`` bytes. A remote one resumes inside ``read`` by itself."""

    @property
    def nbytes(self) -> int: ...


def together(modes: Iterable[str]) -> str:
    """How all of it was read: ``CACHED`` if nothing of it came by the path."""
    found = set(modes)
    return next(iter(sorted(found - {CACHED})), CACHED if found else "")


@dataclass(frozen=True, slots=True)
class Segment:
    """Bytes ``[offset, offset + nbytes)`` of a partition are ``[source_offset, …)`` of ``source``."""

    source: ByteSource
    source_offset: int
    offset: int
    nbytes: int


class SegmentedPartition:
    """``ChunkSource`` made of segments of one path; what no segment covers is zero. Owns their sources."""

    def __init__(self, name: str, segments: Sequence[Segment]) -> None:
        self._name = name
        self._segments = sorted(segments, key=lambda segment: segment.offset)
        self._starts = [segment.offset for segment in self._segments]
        ends = [segment.offset + segment.nbytes for segment in self._segments]
        if any(end > start for end, start in zip(ends, self._starts[1:], strict=False)):
            raise InvalidCheckpoint(f"{name}: two of its segments overlap", field=name)
        paths = {segment.source.path for segment in self._segments}
        if len(paths) != 1:
            raise InvalidCheckpoint(f"{name}: its segments come by {len(paths)} paths, one is served", field=name)
        self._path = paths.pop()

    @property
    def path(self) -> str:
        return self._path

    @property
    def name(self) -> str:
        return self._name

    def read(self, view: memoryview, offset: int) -> str:
        """As ``ChunkSource.read``; a chunk may span several segments."""
        end, at, modes = offset + len(view), offset, []
        for segment in self._segments[max(bisect.bisect_right(self._starts, offset) - 1, 0) :]:
            if segment.offset >= end:
                break
            first, last = max(segment.offset, at), min(segment.offset + segment.nbytes, end)
            if first >= last:
                continue
            _zero(view[at - offset : first - offset])
            part = view[first - offset : last - offset]
            modes.append(segment.source.read(part, first - segment.offset + segment.source_offset))
            at = last
        _zero(view[at - offset :])
        return together(modes)

    def close(self) -> None:
        for source in {id(segment.source): segment.source for segment in self._segments}.values():
            source.close()


def _zero(view: memoryview) -> None:
    if len(view):
        view[:] = bytes(len(view))


def close_all(sources: Iterable[ChunkSource]) -> None:
    """Give back what they have open."""
    for source in sources:
        source.close()
