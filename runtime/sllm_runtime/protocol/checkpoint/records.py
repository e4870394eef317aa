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
MAX_RANKS: Final = 256
MAX_SHARED_CHUNKS: Final = 2**20
"""Sum over all blocks of the chunks of what they share: bounds the work that an index can ask for."""
DIGEST_HEX: Final = 32
"""Hex digits of one chunk's xxh3-128."""

ITEM_BYTES: Final[dict[str, int]] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "bits8": 1, "bits16": 2, "bits1x8": 1, "bits2x4": 1, "bits4x2": 1,
}  # fmt: skip
"""Bytes per element, by torch's name of the dtype: all that torch can save without a quantiser of its own."""

QUANT_BLOCKS: Final[dict[str, tuple[int, int]]] = {
    "q4_0": (32, 18), "q4_1": (32, 20), "q5_0": (32, 22), "q5_1": (32, 24), "q8_0": (32, 34),
    "q2_k": (256, 84), "q3_k": (256, 110), "q4_k": (256, 144), "q5_k": (256, 176), "q6_k": (256, 210),
    "iq4_nl": (32, 18), "iq4_xs": (256, 136), "tq1_0": (256, 54), "tq2_0": (256, 66), "mxfp4": (32, 17),
}  # fmt: skip
"""Elements and bytes of one block of GGUF's quantised kinds; blocks lie along the innermost dimension."""


class TensorRecord(msgspec.Struct, frozen=True, gc=False):
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


class SplitRecord(msgspec.Struct, frozen=True):
    """A tensor that several ranks have under the same name: joined along ``dim`` in the order of ``ranks``, their
    parts are the tensor of ``shape``. Without ``dim`` each of them has the whole (a norm in tensor parallelism).
    """

    name: str
    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    dim: int | None = None


class QuantRecord(msgspec.Struct, frozen=True):
    """What the bytes of the uint8 tensor ``name`` mean: packed blocks of ``kind``, ``shape`` elements in all."""

    name: str
    kind: str
    shape: tuple[int, ...]


class AdapterRecord(msgspec.Struct, frozen=True):
    """The checkpoint is an adapter of the model ``base`` (as its author named it), not a model of its own.

    A target's weight is ``W + alpha / rank * B @ A``, or with ``alpha / sqrt(rank)`` if ``rslora``. Ranks and alphas
    of single modules, where they differ, are in the adapter's own ``adapter_config.json`` beside the index.
    """

    base: str
    kind: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool = False


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
    """The raw bytes of one rank; ``digests[i]`` is the xxh3-128 of chunk i (the last one may be short).

    There are none in an index with ``segments``.
    """

    rank: int
    nbytes: int
    digests: tuple[str, ...]


class SegmentRecord(msgspec.Struct, frozen=True):
    """Bytes ``[offset, offset + nbytes)`` of a rank's partition are the whole file ``name`` of the source.

    ``tag`` changes with the file's content, as far as can be told without reading it all.
    """

    name: str
    rank: int
    offset: int
    nbytes: int
    tag: str = ""


class FileRecord(msgspec.Struct, frozen=True):
    """A small file of the model (configuration, tokenizer) that stands beside the index."""

    name: str
    nbytes: int
    sha256: str


class CheckpointIndex(msgspec.Struct, frozen=True):
    """Everything about a checkpoint but its bytes. ``order`` says where the execution order comes from:
    ``traced`` (a forward pass on the meta device), ``module`` (order of registration), ``names`` (layer numbers in
    them) or ``offset`` (in the files). ``layout`` says how tensors are held (``hf``: as transformers' modules hold
    them); several layouts of a model stand side by side, each a checkpoint with a digest of its own.
    """

    partitions: tuple[PartitionRecord, ...]
    blocks: tuple[BlockRecord, ...]
    tensors: tuple[TensorRecord, ...]
    aliases: tuple[AliasRecord, ...] = ()
    views: tuple[TensorRecord, ...] = ()
    """Names for parts of tensors (an expert inside a fused tensor): they may overlap, tensors may not."""
    splits: tuple[SplitRecord, ...] = ()
    quants: tuple[QuantRecord, ...] = ()
    adapter: AdapterRecord | None = None
    files: tuple[FileRecord, ...] = ()
    segments: tuple[SegmentRecord, ...] = ()
    """Not converted: partitions are made of these files, and have digests only where they are loaded."""
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
