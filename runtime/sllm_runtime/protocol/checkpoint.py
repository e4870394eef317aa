"""The checkpoint's index: what `index.json` says about the bytes in `partition_<rank>.bin`.

A checkpoint is a directory with the index, one file of raw bytes per rank, and the model's own small files.
Every number of an index is checked here, before anybody uses it. No I/O, no torch.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final

import msgspec

from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.protocol.limits import CHUNK_BYTES, KIB, MIB

INDEX_NAME: Final = "index.json"
INDEX_VERSION: Final = 1
MAX_INDEX: Final = 256 * MIB
"""An index above this is refused unread (a million tensors fit)."""
TENSOR_ALIGN: Final = 256
BLOCK_ALIGN: Final = 4 * KIB
"""Blocks and partitions are padded to this, so that every read can be direct I/O."""
MAX_BYTES: Final = 2**53
"""Largest size or offset: exact in every JSON reader, and no sum of two overflows 64 bits."""
MAX_DIMS: Final = 64
DIGEST_HEX: Final = 32
"""Hex digits of one chunk's xxh3-128."""

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of the dtype."""


class TensorRecord(msgspec.Struct, frozen=True):
    """One tensor: ``shape`` and ``stride`` in elements, ``offset`` and ``nbytes`` in bytes of its rank's partition."""

    name: str
    rank: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class AliasRecord(msgspec.Struct, frozen=True):
    """Another name of the tensor ``of``: a tie, or the name it had in the source."""

    name: str
    of: str


class BlockRecord(msgspec.Struct, frozen=True):
    """A run of whole layers: bytes ``[offset, offset + nbytes)`` of its rank's partition.

    ``shared`` names tensors outside that range which its layers also need (a tied output head needs the
    embedding): the block is ready when those bytes are there too. ``layers`` is None for what stands before
    and after the layers.
    """

    rank: int
    offset: int
    nbytes: int
    layers: tuple[int, int] | None = None
    shared: tuple[str, ...] = ()


class PartitionRecord(msgspec.Struct, frozen=True):
    """The raw bytes of one rank; ``digests[i]`` is the xxh3-128 of chunk i (the last one may be short)."""

    rank: int
    nbytes: int
    digests: tuple[str, ...]


class FileRecord(msgspec.Struct, frozen=True):
    """A small file of the model (configuration, tokenizer) that stands beside the index."""

    name: str
    nbytes: int
    sha256: str


class CheckpointIndex(msgspec.Struct, frozen=True):
    """Everything about a checkpoint but its bytes. ``order`` says where the execution order comes from:
    ``traced`` (a forward pass on the meta device), ``module`` (order of registration) or ``offset`` (in the files).
    """

    partitions: tuple[PartitionRecord, ...]
    blocks: tuple[BlockRecord, ...]
    tensors: tuple[TensorRecord, ...]
    aliases: tuple[AliasRecord, ...] = ()
    views: tuple[TensorRecord, ...] = ()
    """Names for parts of tensors (an expert inside a fused tensor): they may overlap, tensors may not."""
    files: tuple[FileRecord, ...] = ()
    version: int = INDEX_VERSION
    layout: str = "hf"
    order: str = "offset"
    digest: str = "xxh3-128"
    chunk_bytes: int = CHUNK_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of all partitions."""
        return sum(partition.nbytes for partition in self.partitions)

    def partition(self, rank: int) -> PartitionRecord:
        """The partition of ``rank``. Raises ``InvalidCheckpoint`` if there is none."""
        for partition in self.partitions:
            if partition.rank == rank:
                return partition
        raise InvalidCheckpoint(
            f"this checkpoint has no partition {rank}, only {[p.rank for p in self.partitions]}",
            field="partition",
        )


def partition_name(rank: int) -> str:
    """File name of the partition of ``rank``."""
    return f"partition_{rank}.bin"


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
    by_name = {tensor.name: tensor for tensor in index.tensors}
    result = []
    for block in rank_blocks(index, rank):
        needed = set(chunks_of(block.offset, block.nbytes, index.chunk_bytes))
        for name in block.shared:
            tensor = by_name[name]
            if tensor.rank == rank:
                needed.update(chunks_of(tensor.offset, tensor.nbytes, index.chunk_bytes))
        result.append(tuple(sorted(needed)))
    return result


def encode_index(index: CheckpointIndex) -> bytes:
    """The canonical bytes of ``index``: the same index gives the same bytes everywhere."""
    return msgspec.json.encode(index) + b"\n"


def index_digest(data: bytes) -> str:
    """Identity of a model, ``sha256:<hex>`` of its index's bytes, which cover every other byte by digests."""
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def digest_hex(digest: str) -> str:
    """The hex part of a model's digest. Raises ``InvalidCheckpoint`` if ``digest`` is none."""
    kind, _, digits = digest.partition(":")
    if kind != "sha256" or not _is_hex(digits, 64):
        raise InvalidCheckpoint(f"{digest!r} is not a model digest (sha256:<64 hex digits>)", field="model")
    return digits


def decode_index(data: bytes) -> CheckpointIndex:
    """The checked index in ``data``. Raises ``InvalidCheckpoint``, and nothing else, whatever the bytes are."""
    if len(data) > MAX_INDEX:
        raise InvalidCheckpoint(f"index of {len(data)} bytes is above the limit of {MAX_INDEX}", field=INDEX_NAME)
    try:
        index = _DECODER.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{INDEX_NAME} is not a checkpoint index: {error}", field=INDEX_NAME) from error
    check_index(index)
    return index


_DECODER = msgspec.json.Decoder(CheckpointIndex)


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
        if not all(_is_hex(digest, DIGEST_HEX) for digest in part.digests):
            raise _bad(where, f"a digest is not {DIGEST_HEX} lower-case hex digits")
        sizes[expected] = part.nbytes
    if not sizes:
        raise _bad("partitions", "there is no partition")
    return sizes


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and all(c in "0123456789abcdef" for c in text)


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


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to behind the last one that a tensor reaches; 0 if it has none."""
    if math.prod(shape) == 0:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


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
        if not 0 <= file.nbytes <= MAX_BYTES or not _is_hex(file.sha256, 64):
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


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is one path component of printable characters, and no hidden one."""
    return 0 < len(name) <= 255 and name[0] != "." and "/" not in name and "\\" not in name and name.isprintable()


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
