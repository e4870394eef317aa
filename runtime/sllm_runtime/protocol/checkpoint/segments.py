"""Checkpoints that were not converted: a partition is made of the source's own files, laid side by side.

Each file lies at a border of 4 KiB of a partition that exists nowhere as such, so direct I/O lines up; tensors are
bound where the files' headers say. Nothing is in execution order there: blocks have no range but name their tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

from sllm_runtime.protocol.checkpoint.names import bad, is_plain_name
from sllm_runtime.protocol.checkpoint.records import (
    BLOCK_ALIGN,
    INDEX_NAME,
    MAX_BYTES,
    BlockRecord,
    CheckpointIndex,
    SegmentRecord,
    TensorRecord,
)

_MAX_TAG = 200


def check_segments(index: CheckpointIndex, sizes: Mapping[int, int]) -> None:
    """Check ``index.segments``, and that tensors and blocks fit them. Raises ``InvalidCheckpoint``."""
    names: set[str] = set()
    for segment in index.segments:
        where = f"segments[{segment.name!r}]"
        if segment.name in names:
            raise bad(where, "the same file stands there twice")
        names.add(segment.name)
        _check_segment(where, segment, sizes)
    for rank in sizes:
        placed = sorted((s.offset, s.offset + s.nbytes) for s in index.segments if s.rank == rank)
        if any(end > start for (_, end), (start, _) in pairwise(placed)):
            raise bad(f"segments[{rank}]", "two files overlap")
        _check_inside((t for t in index.tensors if t.rank == rank and t.nbytes), placed)
    _check_listed(index.tensors, index.blocks)


def _check_segment(where: str, segment: SegmentRecord, sizes: Mapping[int, int]) -> None:
    if not is_plain_name(segment.name) or segment.name == INDEX_NAME or segment.name.startswith("partition_"):
        raise bad(where, "a file's name must be a plain name of its own")
    if segment.rank not in sizes:
        raise bad(where, f"partition {segment.rank} is not there")
    if not (0 <= segment.offset <= MAX_BYTES and 0 <= segment.nbytes <= MAX_BYTES) or segment.offset % BLOCK_ALIGN:
        raise bad(where, f"offset {segment.offset} or size {segment.nbytes} is wrong")
    if segment.offset + segment.nbytes > sizes[segment.rank]:
        raise bad(where, f"it ends at {segment.offset + segment.nbytes}, behind its partition")
    if len(segment.tag) > _MAX_TAG or not segment.tag.isprintable():
        raise bad(where, "its tag is no short text")


def _check_inside(tensors: Iterable[TensorRecord], placed: list[tuple[int, int]]) -> None:
    """Each tensor lies in one file."""
    files = iter(placed)
    start = end = 0
    for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
        while tensor.offset >= end:
            start, end = next(files, (MAX_BYTES + 1, 2 * MAX_BYTES + 2))
        if not start <= tensor.offset or tensor.offset + tensor.nbytes > end:
            raise bad(f"tensors[{tensor.name!r}]", "it lies in no file")


def _check_listed(tensors: Iterable[TensorRecord], blocks: Iterable[BlockRecord]) -> None:
    """Blocks have no range, and some block waits for each tensor."""
    listed: set[tuple[int, str]] = set()
    for number, block in enumerate(blocks):
        if block.offset or block.nbytes:
            raise bad(f"blocks[{number}]", "a block of files that were not converted has no range of its own")
        listed.update((block.rank, name) for name in block.shared)
    for tensor in tensors:
        if (tensor.rank, tensor.name) not in listed:
            raise bad(f"tensors[{tensor.name!r}]", "no block waits for it")
