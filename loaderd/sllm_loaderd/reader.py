"""Bytes by offset: of one object (``ByteSource``), or of one partition (``ChunkSource``), maybe of many objects."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sllm_runtime.protocol.errors import InvalidCheckpoint


class ChunkSource(Protocol):
    """Bytes of one partition by offset. Used by several I/O threads at once.

    ``path`` is the way the bytes come by (``disk``, ``s3 bucket``, ``http host``, ``peer node``): its queue and its
    bandwidth are measured apart. ``name`` is what an error message calls it.
    """

    @property
    def path(self) -> str: ...

    @property
    def name(self) -> str: ...

    def read(self, view: memoryview, offset: int) -> None:
        """Fill ``view`` from ``offset`` on, whole, or raise a typed error naming object and offset. Blocks.

        A retryable error (``Unavailable``) or bytes that do not match send the chunk to the partition's next source.
        """

    def close(self) -> None:
        """Give back descriptors; called once, when no read is under way."""


class ByteSource(ChunkSource, Protocol):
    """Bytes of one object of ``nbytes`` bytes. A remote one resumes inside ``read`` by itself."""

    @property
    def nbytes(self) -> int: ...


def mode_of(source: ChunkSource) -> str:
    """How a local source reads: ``direct`` or ``buffered``; empty for what is not local."""
    return str(getattr(source, "mode", ""))


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

    @property
    def mode(self) -> str:
        """How its sources read."""
        return mode_of(self._segments[0].source)

    def read(self, view: memoryview, offset: int) -> None:
        """As ``ChunkSource.read``; a chunk may span several segments."""
        end, at = offset + len(view), offset
        for segment in self._segments[max(bisect.bisect_right(self._starts, offset) - 1, 0) :]:
            if segment.offset >= end:
                break
            first, last = max(segment.offset, at), min(segment.offset + segment.nbytes, end)
            if first >= last:
                continue
            _zero(view[at - offset : first - offset])
            segment.source.read(view[first - offset : last - offset], first - segment.offset + segment.source_offset)
            at = last
        _zero(view[at - offset :])

    def close(self) -> None:
        for source in {id(segment.source): segment.source for segment in self._segments}.values():
            source.close()


def _zero(view: memoryview) -> None:
    if len(view):
        view[:] = bytes(len(view))
