"""The checkpoint's index: what `index.json` says about the bytes in `partition_<rank>.bin`.

A checkpoint is a directory with the index, one file of raw bytes per rank, and the model's own small files.
"""

from sllm_runtime.protocol.checkpoint.checks import check_index
from sllm_runtime.protocol.checkpoint.encoding import (
    decode_index,
    digest_hex,
    encode_index,
    index_digest,
)
from sllm_runtime.protocol.checkpoint.geometry import (
    align,
    block_chunks,
    chunk_count,
    chunks_of,
    contiguous_stride,
    extent,
    rank_blocks,
)
from sllm_runtime.protocol.checkpoint.names import is_hex, is_plain_name
from sllm_runtime.protocol.checkpoint.parts import piece_bounds
from sllm_runtime.protocol.checkpoint.records import (
    BLOCK_ALIGN,
    DIGEST_HEX,
    INDEX_NAME,
    INDEX_VERSION,
    ITEM_BYTES,
    MAX_BYTES,
    MAX_DIMS,
    MAX_INDEX,
    MAX_RANKS,
    MAX_SHARED_CHUNKS,
    QUANT_BLOCKS,
    TENSOR_ALIGN,
    AdapterRecord,
    AliasRecord,
    BlockRecord,
    CheckpointIndex,
    FileRecord,
    PartitionRecord,
    QuantRecord,
    SplitRecord,
    TensorRecord,
    partition_name,
)

__all__ = [
    "BLOCK_ALIGN",
    "DIGEST_HEX",
    "INDEX_NAME",
    "INDEX_VERSION",
    "ITEM_BYTES",
    "MAX_BYTES",
    "MAX_DIMS",
    "MAX_INDEX",
    "MAX_RANKS",
    "MAX_SHARED_CHUNKS",
    "QUANT_BLOCKS",
    "TENSOR_ALIGN",
    "AdapterRecord",
    "AliasRecord",
    "BlockRecord",
    "CheckpointIndex",
    "FileRecord",
    "PartitionRecord",
    "QuantRecord",
    "SplitRecord",
    "TensorRecord",
    "align",
    "block_chunks",
    "check_index",
    "chunk_count",
    "chunks_of",
    "contiguous_stride",
    "decode_index",
    "digest_hex",
    "encode_index",
    "extent",
    "index_digest",
    "is_hex",
    "is_plain_name",
    "partition_name",
    "piece_bounds",
    "rank_blocks",
]
