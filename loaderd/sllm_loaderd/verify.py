"""Opening, describing and validating a checkpoint directory. No platform, no torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sllm_loaderd.disk.local import LocalPartition
from sllm_loaderd.files import chunk_digest, read_exactly, require_enough, write_durable
from sllm_loaderd.reader import ChunkSource
from sllm_runtime.protocol.checkpoint import (
    INDEX_NAME,
    CheckpointIndex,
    FileRecord,
    PartitionRecord,
    block_bytes,
    decode_index,
    index_digest,
)
from sllm_runtime.protocol.errors import CorruptCheckpoint, DigestMismatch, InvalidCheckpoint
from sllm_runtime.protocol.loader import BlockInfo, ModelInfo


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint: its index is checked, its bytes are not."""

    directory: Path
    digest: str
    encoded: bytes
    index: CheckpointIndex


def open_checkpoint(directory: Path, digest: str | None = None) -> Checkpoint:
    """Read and check the index in ``directory``.

    Raises ``InvalidCheckpoint``, or ``DigestMismatch`` if it is not the index that ``digest`` names.
    """
    path = directory / INDEX_NAME
    try:
        encoded = path.read_bytes()
    except OSError as error:
        require_enough(error, path)
        raise InvalidCheckpoint(
            f"{path} cannot be read: {error.strerror}; is {directory} a converted model?", field=str(path)
        ) from error
    found = index_digest(encoded)
    if digest is not None and found != digest:
        raise DigestMismatch(f"{path} is the index of {found}, not of {digest}; convert the model again", field="model")
    return Checkpoint(directory, found, encoded, decode_index(encoded))


def read_small_file(directory: Path, record: FileRecord) -> bytes:
    """A small file's checked content. Raises ``CorruptCheckpoint``."""
    path = directory / record.name
    try:
        data = path.read_bytes()
    except OSError as error:
        require_enough(error, path)
        raise CorruptCheckpoint(
            f"{path} cannot be read: {error.strerror}; convert the model again", field=str(path)
        ) from error
    if len(data) != record.nbytes or hashlib.sha256(data).hexdigest() != record.sha256:
        raise CorruptCheckpoint(f"{path} is not the file its index names; convert the model again", field=str(path))
    return data


def validate_checkpoint(
    directory: Path,
    progress: Callable[[int, int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False,
    open_partition: Callable[[Checkpoint, int], ChunkSource] | None = None,
    stated: Callable[[Checkpoint], CheckpointIndex] = lambda checkpoint: checkpoint.index,
) -> Checkpoint:
    """Read every byte of a checkpoint and compare it with its digest.

    Raises ``CorruptCheckpoint`` naming the first bad chunk and the tensors in it. ``stopped`` is asked before each
    chunk; what it cuts short returns as if it were good. ``open_partition``: where partitions are, if not there.
    ``stated``: the index with the digests that are known of a model that came without; "" where there is none yet.
    """
    opened = open_partition or _local_partition
    checkpoint = open_checkpoint(directory)
    for record in checkpoint.index.files:
        read_small_file(directory, record)
    done, index = 0, stated(checkpoint)
    for partition in index.partitions:
        with contextlib.closing(opened(checkpoint, partition.rank)) as source:
            for number in range(len(partition.digests)):
                if stopped():
                    return checkpoint
                done += _validate_chunk(index, partition, number, source)
                if progress is not None:
                    progress(done, index.nbytes)
    return checkpoint


def _local_partition(checkpoint: Checkpoint, rank: int) -> LocalPartition:
    return LocalPartition(checkpoint.directory, rank, checkpoint.index.partition(rank).nbytes)


def _validate_chunk(index: CheckpointIndex, partition: PartitionRecord, number: int, source: ChunkSource) -> int:
    start = number * index.chunk_bytes
    nbytes = min(index.chunk_bytes, partition.nbytes - start)
    buffer = bytearray(nbytes)
    source.read(memoryview(buffer), start)
    if partition.digests[number] and chunk_digest(buffer) != partition.digests[number]:
        names = chunk_tensors(index, partition.rank, number)
        listed = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        raise CorruptCheckpoint(
            f"{source.name}: chunk {number} (bytes {start} to {start + nbytes}) does not match its digest; it holds"
            f" {listed or 'padding'}; restore the file or convert the model again",
            field=source.name,
        )
    return nbytes


def chunk_tensors(index: CheckpointIndex, rank: int, number: int) -> list[str]:
    """Names of the tensors that have bytes in a chunk."""
    start, end = number * index.chunk_bytes, (number + 1) * index.chunk_bytes
    return [t.name for t in index.tensors if t.rank == rank and t.offset < end and t.offset + t.nbytes > start]


def describe(checkpoint: Checkpoint, *, sources: tuple[str, ...] = (), resident: int = 0) -> ModelInfo:
    """What there is to say about a checkpoint without reading its bytes."""
    index = checkpoint.index
    dtypes, packed = _sizes(index)
    biggest = sorted(index.tensors, key=lambda tensor: (-tensor.nbytes, tensor.name))[:10]
    return ModelInfo(
        model=checkpoint.digest,
        nbytes=index.nbytes,
        partitions=tuple(partition.nbytes for partition in index.partitions),
        tensors=len({tensor.name for tensor in index.tensors}),
        dtype=max(dtypes, key=lambda name: (dtypes[name], name), default=""),
        dtypes=dtypes,
        architecture=_architecture(checkpoint),
        layout=index.layout,
        order=index.order,
        blocks=tuple(BlockInfo(block.rank, block_bytes(index, block), block.layers) for block in index.blocks),
        biggest=tuple((tensor.name, tensor.nbytes) for tensor in biggest),
        files=tuple(file.name for file in index.files),
        aliases=len(index.aliases),
        splits=len(index.splits),
        packed=packed,
        adapter=index.adapter.base if index.adapter is not None else "",
        sources=sources,
        resident=resident,
    )


def _sizes(index: CheckpointIndex) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by dtype, and of packed tensors by the kind of their blocks."""
    kinds = {quant.name: quant.kind for quant in index.quants}
    dtypes: Counter[str] = Counter()
    packed: Counter[str] = Counter()
    for tensor in index.tensors:
        dtypes[tensor.dtype] += tensor.nbytes
        if tensor.name in kinds:
            packed[kinds[tensor.name]] += tensor.nbytes
    return dict(sorted(dtypes.items())), dict(sorted(packed.items()))


def _architecture(checkpoint: Checkpoint) -> str:
    record = next((file for file in checkpoint.index.files if file.name == "config.json"), None)
    if record is None:
        return ""
    try:
        names = json.loads(read_small_file(checkpoint.directory, record)).get("architectures")
    except (ValueError, AttributeError):
        return ""
    return str(names[0]) if isinstance(names, list) and names else ""


def copy_checkpoint(source: Checkpoint, target: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Copy a checkpoint into the new directory ``target``, durable, checking every byte as it passes.

    Raises ``CorruptCheckpoint``; what is there then is the caller's to remove.
    """
    from sllm_loaderd.convert.writer import PartitionWriter
    from sllm_runtime.protocol.checkpoint import partition_name

    target.mkdir()
    index, done = source.index, 0
    for partition in index.partitions:
        reader = LocalPartition(source.directory, partition.rank, partition.nbytes)
        path = target / partition_name(partition.rank)
        with contextlib.closing(reader), PartitionWriter(path, partition.rank, index.chunk_bytes) as writer:
            while writer.offset < partition.nbytes:
                count = min(len(writer.space), partition.nbytes - writer.offset)
                with writer.space as space, space[:count] as view:
                    reader.read(view, writer.offset)
                writer.advance(count)
                done += count
                if progress is not None:
                    progress(done, index.nbytes)
            if writer.finish(partition.nbytes) != partition:
                validate_checkpoint(source.directory)  # raises with the chunk and its tensors
                raise CorruptCheckpoint(f"{reader.name} changed while it was copied; try again", field=reader.name)
    for record in index.files:
        write_durable(target / record.name, read_small_file(source.directory, record))
    write_durable(target / INDEX_NAME, source.encoded)


__all__ = [
    "Checkpoint", "chunk_tensors", "copy_checkpoint", "describe", "open_checkpoint", "read_exactly",
    "read_small_file", "validate_checkpoint",
]  # fmt: skip
