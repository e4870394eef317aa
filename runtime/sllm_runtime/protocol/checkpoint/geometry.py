"""Arithmetic over an index: alignment, strides, and which chunks a range of bytes or a block needs. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence

from sllm_runtime.protocol.checkpoint.records import BlockRecord, CheckpointIndex


def align(value: int, to: int) -> int:
    """``value`` rounded up to a multiple of ``to``."""
    return -(-value // to) * to


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides in elements, as torch gives them (a size of 0 counts as 1)."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Chunks that a partition of ``nbytes`` has."""
    return -(-nbytes // chunk_bytes)


def chunks_of(offset: int, nbytes: int, chunk_bytes: int) -> range:
    """Numbers of the chunks that the bytes ``[offset, offset + nbytes)`` touch."""
    return range(offset // chunk_bytes, chunk_count(offset + nbytes, chunk_bytes)) if nbytes else range(0)


def rank_blocks(index: CheckpointIndex, rank: int) -> list[BlockRecord]:
    """Blocks of ``rank`` in execution order; a block's number is its place in this list."""
    return [block for block in index.blocks if block.rank == rank]


def block_chunks(index: CheckpointIndex, rank: int) -> list[tuple[int, ...]]:
    """For each block of ``rank``: the chunks that must be there before it is ready, ascending."""
    here = {tensor.name: tensor for tensor in index.tensors if tensor.rank == rank}
    result = []
    for block in rank_blocks(index, rank):
        needed = set(chunks_of(block.offset, block.nbytes, index.chunk_bytes))
        for name in block.shared:
            tensor = here.get(name)  # what another rank holds is not this partition's to wait for
            if tensor is not None:
                needed.update(chunks_of(tensor.offset, tensor.nbytes, index.chunk_bytes))
        result.append(tuple(sorted(needed)))
    return result


def block_bytes(index: CheckpointIndex, block: BlockRecord) -> int:
    """Bytes that are a block's own."""
    return sum(nbytes for _, nbytes in block_spans(index, block))


def block_spans(index: CheckpointIndex, block: BlockRecord) -> list[tuple[int, int]]:
    """Ranges (offset, bytes) that are a block's own: one, or, where nothing was converted, those of its tensors."""
    if not index.segments:
        return [(block.offset, block.nbytes)]
    names = set(block.shared)
    own = sorted((t.offset, t.nbytes) for t in index.tensors if t.rank == block.rank and t.name in names)
    spans: list[tuple[int, int]] = []
    for offset, nbytes in own:
        if spans and sum(spans[-1]) == offset:
            spans[-1] = (spans[-1][0], spans[-1][1] + nbytes)
        else:
            spans.append((offset, nbytes))
    return spans


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last one that a tensor reaches; 0 if it has none."""
    last = 0
    for size, step in zip(shape, stride, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * step
    return last + 1
