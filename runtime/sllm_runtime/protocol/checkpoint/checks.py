"""Every number of an index is checked here, before anybody uses it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from sllm_runtime.protocol.checkpoint.geometry import chunk_count, extent, rank_blocks
from sllm_runtime.protocol.checkpoint.names import is_hex, is_plain_name
from sllm_runtime.protocol.checkpoint.records import (
    BLOCK_ALIGN,
    DIGEST_HEX,
    INDEX_NAME,
    INDEX_VERSION,
    ITEM_BYTES,
    MAX_BYTES,
    MAX_DIMS,
    TENSOR_ALIGN,
    AliasRecord,
    BlockRecord,
    CheckpointIndex,
    TensorRecord,
)
from sllm_runtime.protocol.errors import InvalidCheckpoint


def check_index(index: CheckpointIndex) -> None:
    """Check every number before it is used. Raises ``InvalidCheckpoint`` with ``field`` naming the first bad one."""
    _check_head(index)
    sizes = _check_partitions(index)
    for kind, records in (("tensors", index.tensors), ("views", index.views)):
        for record in records:
            _check_tensor(kind, record, sizes)
    _check_names(index)
    for rank, nbytes in sizes.items():
        _check_no_overlap(rank, index.tensors)
        _check_blocks(index, rank, nbytes)
    if any(block.rank not in sizes for block in index.blocks):
        raise _bad("blocks", "a block lies in a partition that is not there")


def _bad(field: str, message: str) -> InvalidCheckpoint:
    return InvalidCheckpoint(f"{message}; convert the model again", field=field)


def _check_head(index: CheckpointIndex) -> None:
    if index.version != INDEX_VERSION:
        raise _bad("version", f"index version {index.version} is not {INDEX_VERSION}, the one this release reads")
    if index.digest != "xxh3-128":
        raise _bad("digest", f"chunk digest {index.digest!r} is unknown")
    chunk = index.chunk_bytes
    if not BLOCK_ALIGN <= chunk <= 2**30 or chunk % BLOCK_ALIGN:
        raise _bad("chunk_bytes", f"chunk size {chunk} is no multiple of {BLOCK_ALIGN} between it and 1 GiB")


def _check_partitions(index: CheckpointIndex) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for expected, part in enumerate(index.partitions):
        where = f"partitions[{expected}]"
        if part.rank != expected:
            raise _bad(where, f"partition {expected} states rank {part.rank}")
        if not 0 <= part.nbytes <= MAX_BYTES or part.nbytes % BLOCK_ALIGN:
            raise _bad(where, f"partition size {part.nbytes} is no multiple of {BLOCK_ALIGN} up to {MAX_BYTES}")
        wanted = chunk_count(part.nbytes, index.chunk_bytes)
        if len(part.digests) != wanted:
            raise _bad(where, f"{len(part.digests)} digests for {wanted} chunks")
        if not all(is_hex(digest, DIGEST_HEX) for digest in part.digests):
            raise _bad(where, f"a digest is not {DIGEST_HEX} lower-case hex digits")
        sizes[expected] = part.nbytes
    if not sizes:
        raise _bad("partitions", "there is no partition")
    return sizes


def _check_tensor(kind: str, tensor: TensorRecord, sizes: dict[int, int]) -> None:
    where = f"{kind}[{tensor.name!r}]"
    item = ITEM_BYTES.get(tensor.dtype)
    if item is None:
        raise _bad(where, f"dtype {tensor.dtype!r} is unknown")
    if tensor.rank not in sizes:
        raise _bad(where, f"partition {tensor.rank} is not there")
    if len(tensor.shape) > MAX_DIMS or len(tensor.shape) != len(tensor.stride):
        raise _bad(where, f"shape {tensor.shape} and stride {tensor.stride} do not fit together")
    if any(not 0 <= number <= MAX_BYTES for number in (*tensor.shape, *tensor.stride, tensor.offset, tensor.nbytes)):
        raise _bad(where, f"a number is negative or above {MAX_BYTES}")
    if extent(tensor.shape, tensor.stride) * item != tensor.nbytes:
        raise _bad(where, f"shape {tensor.shape} of {tensor.dtype} is not {tensor.nbytes} bytes")
    if tensor.offset + tensor.nbytes > sizes[tensor.rank]:
        raise _bad(where, f"it ends at {tensor.offset + tensor.nbytes}, behind its partition")
    if tensor.offset % (TENSOR_ALIGN if kind == "tensors" else item):
        raise _bad(where, f"offset {tensor.offset} is not aligned")


def _check_names(index: CheckpointIndex) -> None:
    stored = {tensor.name for tensor in index.tensors}
    _no_repeat("tensors", (record.name for record in _named(index)))
    for alias in index.aliases:
        if alias.of not in stored:
            raise _bad(f"aliases[{alias.name!r}]", f"it stands for {alias.of!r}, which is not there")
    _no_repeat("files", (file.name for file in index.files))
    for file in index.files:
        where = f"files[{file.name!r}]"
        if not is_plain_name(file.name) or file.name == INDEX_NAME or file.name.startswith("partition_"):
            raise _bad(where, "a small file's name must be a plain name of its own")
        if not 0 <= file.nbytes <= MAX_BYTES or not is_hex(file.sha256, 64):
            raise _bad(where, "size or sha256 is wrong")


def _named(index: CheckpointIndex) -> Iterator[TensorRecord | AliasRecord]:
    yield from index.tensors
    yield from index.aliases
    yield from index.views


def _no_repeat(field: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise _bad(f"{field}[{name!r}]", "the same name stands there twice")
        seen.add(name)


def _check_no_overlap(rank: int, tensors: Iterable[TensorRecord]) -> None:
    placed = sorted((t.offset, t.offset + t.nbytes, t.name) for t in tensors if t.rank == rank and t.nbytes)
    for (_, end, first), (start, _, second) in pairwise(placed):
        if start < end:
            raise _bad(f"tensors[{second!r}]", f"its bytes overlap those of {first!r}")


def _check_blocks(index: CheckpointIndex, rank: int, nbytes: int) -> None:
    """Blocks tile the partition without hole or overlap, and no tensor crosses a border."""
    blocks = rank_blocks(index, rank)
    end = 0
    for number, block in enumerate(blocks):
        where = f"blocks[{rank}/{number}]"
        if block.offset != end or not 0 <= block.nbytes <= MAX_BYTES or block.offset % BLOCK_ALIGN:
            raise _bad(where, f"it begins at {block.offset}, the one before ends at {end}")
        if block.layers is not None and not 0 <= block.layers[0] <= block.layers[1] <= MAX_BYTES:
            raise _bad(where, f"layer range {block.layers} is wrong")
        end = block.offset + block.nbytes
    if end != nbytes:
        raise _bad(f"blocks[{rank}]", f"blocks cover {end} of {nbytes} bytes")
    _check_borders(index, rank, blocks)
    stored = {tensor.name for tensor in index.tensors}
    for number, block in enumerate(blocks):
        if not stored.issuperset(block.shared):
            raise _bad(f"blocks[{rank}/{number}]", "it shares a tensor that is not there")


def _check_borders(index: CheckpointIndex, rank: int, blocks: Sequence[BlockRecord]) -> None:
    ends = iter([block.offset + block.nbytes for block in blocks])
    end = 0
    for tensor in sorted((t for t in index.tensors if t.rank == rank and t.nbytes), key=lambda t: t.offset):
        while tensor.offset >= end:
            end = next(ends)
        if tensor.offset + tensor.nbytes > end:
            raise _bad(f"tensors[{tensor.name!r}]", "it crosses the border of its block")
