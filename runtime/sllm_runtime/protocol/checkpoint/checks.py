"""Every number of an index is checked here, before anybody uses it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from sllm_runtime.protocol.checkpoint.geometry import chunk_count, extent
from sllm_runtime.protocol.checkpoint.names import bad, is_hex, is_plain_name
from sllm_runtime.protocol.checkpoint.parts import check_parts
from sllm_runtime.protocol.checkpoint.records import (
    BLOCK_ALIGN,
    DIGEST_HEX,
    INDEX_NAME,
    INDEX_VERSION,
    ITEM_BYTES,
    MAX_BYTES,
    MAX_DIMS,
    MAX_RANKS,
    MAX_SHARED_CHUNKS,
    TENSOR_ALIGN,
    BlockRecord,
    CheckpointIndex,
    TensorRecord,
)
from sllm_runtime.protocol.checkpoint.segments import check_segments
from sllm_runtime.protocol.errors import InvalidCheckpoint


def check_index(index: CheckpointIndex) -> None:
    """Check every number before it is used. Raises ``InvalidCheckpoint`` with ``field`` naming the first bad one.

    Takes time in proportion to the index (n log n in its tensors), whatever its numbers are.
    """
    _check_head(index)
    sizes = _check_partitions(index)
    for kind, records in (("tensors", index.tensors), ("views", index.views)):
        _check_tensors(kind, records, sizes, aligned=kind == "tensors" and not index.segments)
    _check_names(index)
    _check_files(index)
    _check_adapter(index)
    tensors, blocks = _by_rank(index.tensors), _by_rank(index.blocks)
    for rank, nbytes in sizes.items():
        _check_no_overlap(tensors.get(rank, []))
        if not index.segments:
            _check_blocks(rank, nbytes, blocks.get(rank, []))
            _check_borders(tensors.get(rank, []), blocks.get(rank, []))
    if not sizes.keys() >= blocks.keys():
        raise bad("blocks", "a block lies in a partition that is not there")
    _check_shared(index)
    check_parts(index)
    if index.segments:
        check_segments(index, sizes)


def _check_head(index: CheckpointIndex) -> None:
    if index.version != INDEX_VERSION:
        raise bad("version", f"index version {index.version} is not {INDEX_VERSION}, the one this release reads")
    if index.digest != "xxh3-128":
        raise bad("digest", f"chunk digest {index.digest!r} is unknown")
    if not is_plain_name(index.layout):
        raise bad("layout", f"layout {index.layout!r} is not a plain name")
    chunk = index.chunk_bytes
    if not BLOCK_ALIGN <= chunk <= 2**30 or chunk % BLOCK_ALIGN:
        raise bad("chunk_bytes", f"chunk size {chunk} is no multiple of {BLOCK_ALIGN} between it and 1 GiB")


def _check_partitions(index: CheckpointIndex) -> dict[int, int]:
    sizes: dict[int, int] = {}
    if not 0 < len(index.partitions) <= MAX_RANKS:
        raise bad("partitions", f"{len(index.partitions)} partitions are not 1 to {MAX_RANKS}")
    for expected, part in enumerate(index.partitions):
        where = f"partitions[{expected}]"
        if part.rank != expected:
            raise bad(where, f"partition {expected} states rank {part.rank}")
        if not 0 <= part.nbytes <= MAX_BYTES or part.nbytes % BLOCK_ALIGN:
            raise bad(where, f"partition size {part.nbytes} is no multiple of {BLOCK_ALIGN} up to {MAX_BYTES}")
        wanted = 0 if index.segments else chunk_count(part.nbytes, index.chunk_bytes)
        if len(part.digests) != wanted:
            raise bad(where, f"{len(part.digests)} digests for {wanted} chunks")
        if not all(is_hex(digest, DIGEST_HEX) for digest in part.digests):
            raise bad(where, f"a digest is not {DIGEST_HEX} lower-case hex digits")
        sizes[expected] = part.nbytes
    return sizes


def _check_tensors(kind: str, tensors: Iterable[TensorRecord], sizes: dict[int, int], *, aligned: bool) -> None:
    """For every tensor: no generator, no text that nobody reads, and what the tensors of all layers have in common is
    worked out once."""
    known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, int]] = {}
    for tensor in tensors:
        form = tensor.dtype, tensor.shape, tensor.stride
        found = known.get(form)
        if found is None:
            found = known[form] = _check_form(kind, tensor)
        item, nbytes = found
        offset, size = tensor.offset, sizes.get(tensor.rank)
        if size is None:
            raise _bad_tensor(kind, tensor, f"partition {tensor.rank} is not there")
        if nbytes != tensor.nbytes:
            raise _bad_tensor(kind, tensor, f"shape {tensor.shape} of {tensor.dtype} is not {tensor.nbytes} bytes")
        if offset < 0 or offset + nbytes > size:
            raise _bad_tensor(kind, tensor, f"it lies from {offset} to {offset + nbytes}, outside of its partition")
        if offset % (TENSOR_ALIGN if aligned else item):
            raise _bad_tensor(kind, tensor, f"offset {offset} is not aligned")


def _check_form(kind: str, tensor: TensorRecord) -> tuple[int, int]:
    """Bytes of an element and of the whole, of which dtype, shape and stride of ``tensor`` tell."""
    item, shape, stride = ITEM_BYTES.get(tensor.dtype), tensor.shape, tensor.stride
    if item is None:
        raise _bad_tensor(kind, tensor, f"dtype {tensor.dtype!r} is unknown")
    if len(shape) > MAX_DIMS or len(shape) != len(stride):
        raise _bad_tensor(kind, tensor, f"shape {shape} and stride {stride} do not fit together")
    numbers = (*shape, *stride)
    if min(numbers, default=0) < 0 or max(numbers, default=0) > MAX_BYTES:
        raise _bad_tensor(kind, tensor, f"a number is negative or above {MAX_BYTES}")
    if math.prod(shape if 0 not in shape else [size for size in shape if size]) > MAX_BYTES:
        raise _bad_tensor(kind, tensor, f"shape {shape} has more than {MAX_BYTES} elements")
    return item, extent(shape, stride) * item


def _bad_tensor(kind: str, tensor: TensorRecord, message: str) -> InvalidCheckpoint:
    return bad(f"{kind}[{tensor.name!r}]", message)


def _check_names(index: CheckpointIndex) -> None:
    """A name means one thing: a tensor (of which several ranks may have parts), another name, or a view."""
    _no_repeat("tensors", ((record.rank, record.name) for record in index.tensors))
    _no_repeat("aliases", ((0, record.name) for record in index.aliases))
    _no_repeat("views", ((record.rank, record.name) for record in index.views))
    stored = {record.name for record in index.tensors}
    aliases = {record.name for record in index.aliases}
    views = {record.name for record in index.views}
    for name in (stored & aliases) | (stored & views) | (aliases & views):
        raise bad(f"tensors[{name!r}]", "the same name stands there twice")
    for alias in index.aliases:
        if alias.of not in stored:
            raise bad(f"aliases[{alias.name!r}]", f"it stands for {alias.of!r}, which is not there")


def _check_files(index: CheckpointIndex) -> None:
    _no_repeat("files", ((0, file.name) for file in index.files))
    for file in index.files:
        where = f"files[{file.name!r}]"
        if not is_plain_name(file.name) or file.name == INDEX_NAME or file.name.startswith("partition_"):
            raise bad(where, "a small file's name must be a plain name of its own")
        if not 0 <= file.nbytes <= MAX_BYTES or not is_hex(file.sha256, 64):
            raise bad(where, "size or sha256 is wrong")


def _check_adapter(index: CheckpointIndex) -> None:
    adapter = index.adapter
    if adapter is None:
        return
    if adapter.kind != "lora":
        raise bad("adapter", f"adapters of kind {adapter.kind!r} are unknown")
    if not 1 <= adapter.rank <= MAX_BYTES or not math.isfinite(adapter.alpha):
        raise bad("adapter", f"rank {adapter.rank} or alpha {adapter.alpha} is wrong")


def _no_repeat(field: str, names: Iterable[tuple[int, str]]) -> None:
    seen: set[tuple[int, str]] = set()
    for key in names:
        if key in seen:
            raise bad(f"{field}[{key[1]!r}]", "the same name stands there twice")
        seen.add(key)


class _Ranked(Protocol):
    @property
    def rank(self) -> int: ...


_R = TypeVar("_R", bound=_Ranked)


def _by_rank(records: Iterable[_R]) -> dict[int, list[_R]]:
    found: dict[int, list[_R]] = {}
    for record in records:
        found.setdefault(record.rank, []).append(record)
    return found


def _check_no_overlap(tensors: Iterable[TensorRecord]) -> None:
    placed = sorted((t.offset, t.offset + t.nbytes, t.name) for t in tensors if t.nbytes)
    for (_, end, first), (start, _, second) in pairwise(placed):
        if start < end:
            raise bad(f"tensors[{second!r}]", f"its bytes overlap those of {first!r}")


def _check_blocks(rank: int, nbytes: int, blocks: Sequence[BlockRecord]) -> None:
    """Blocks tile the partition without hole or overlap."""
    end = 0
    for number, block in enumerate(blocks):
        where = f"blocks[{rank}/{number}]"
        if block.offset != end or not 0 <= block.nbytes <= MAX_BYTES or block.offset % BLOCK_ALIGN:
            raise bad(where, f"it begins at {block.offset}, the one before ends at {end}")
        if block.layers is not None and not 0 <= block.layers[0] <= block.layers[1] <= MAX_BYTES:
            raise bad(where, f"layer range {block.layers} is wrong")
        end = block.offset + block.nbytes
    if end != nbytes:
        raise bad(f"blocks[{rank}]", f"blocks cover {end} of {nbytes} bytes")


def _check_borders(tensors: Iterable[TensorRecord], blocks: Sequence[BlockRecord]) -> None:
    ends = iter([block.offset + block.nbytes for block in blocks])
    end = 0
    for tensor in sorted((t for t in tensors if t.nbytes), key=lambda t: t.offset):
        while tensor.offset >= end:
            end = next(ends)
        if tensor.offset + tensor.nbytes > end:
            raise bad(f"tensors[{tensor.name!r}]", "it crosses the border of its block")


def _check_shared(index: CheckpointIndex) -> None:
    """What blocks share is there, and looking it up is bounded work."""
    sizes: dict[str, int] = {}
    for tensor in index.tensors:
        if tensor.nbytes >= sizes.get(tensor.name, 0):
            sizes[tensor.name] = tensor.nbytes
    chunks = 0
    for number, block in enumerate(index.blocks):
        for name in block.shared:
            if name not in sizes:
                raise bad(f"blocks[{number}]", f"it shares {name!r}, a tensor that is not there")
            chunks += chunk_count(sizes[name], index.chunk_bytes) + 1
    if chunks > MAX_SHARED_CHUNKS:
        raise bad("blocks", f"blocks share {chunks} chunks, above the limit of {MAX_SHARED_CHUNKS}")
