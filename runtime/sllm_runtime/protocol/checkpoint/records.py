"""What `index.json` holds, as records, and the limits on their numbers. No I/O, no torch."""

from __future__ import annotations

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
