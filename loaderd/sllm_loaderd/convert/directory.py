"""Converts one model directory: reads the source once, writes the checkpoint, and makes it visible by a rename."""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sllm_loaderd.convert.plan import StoragePlan, alias_records, plan_storage, view_records
from sllm_loaderd.convert.source import TensorSource, source_files
from sllm_loaderd.convert.writer import PartitionWriter
from sllm_loaderd.files import small_files, sync_directory
from sllm_loaderd.layout import MIN_BLOCK, Placement, place
from sllm_runtime.protocol.checkpoint import (
    INDEX_NAME,
    CheckpointIndex,
    FileRecord,
    PartitionRecord,
    check_index,
    encode_index,
    index_digest,
    partition_name,
)
from sllm_runtime.protocol.errors import Conflict, InvalidCheckpoint
from sllm_runtime.protocol.limits import CHUNK_BYTES, MIB

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""
_COMPARE_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the layout depends on. Nodes convert with the defaults, so that they agree on the digest."""

    chunk_bytes: int = CHUNK_BYTES
    min_block: int = MIN_BLOCK


def convert_directory(
    source: Path, target: Path, *, options: ConvertOptions | None = None, progress: Progress | None = None
) -> str:
    """Convert the Hugging Face directory ``source`` to the checkpoint ``target`` and return its digest.

    ``target`` appears whole or not at all. Raises ``InvalidCheckpoint``, ``UnsupportedModel``, or ``Conflict`` if
    ``target`` is there already.
    """
    if target.exists():
        raise Conflict(f"{target} is there already; remove it or give another name", field="target")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
    try:
        digest = write_checkpoint(source, staging, options=options, progress=progress)
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    sync_directory(target.parent)
    return digest


def write_checkpoint(
    source: Path, target: Path, *, options: ConvertOptions | None = None, progress: Progress | None = None
) -> str:
    """Write the checkpoint of ``source`` into the new directory ``target``, durable, and return its digest.

    What is there after an error is the caller's to remove.
    """
    options = options or ConvertOptions()
    tensors = open_source(source)
    try:
        files = small_files(source)
        plan = _plan(source, tensors)
        planned = [stored.tensor for stored in plan.stored.values()]
        placement = place(plan.order, planned, dict(plan.ties), min_block=options.min_block)
        target.mkdir()
        partition = _write_partition(target, tensors, plan, placement, options, progress)
    finally:
        tensors.close()
    index = CheckpointIndex(
        partitions=(partition,),
        blocks=placement.blocks,
        tensors=placement.tensors,
        aliases=alias_records(plan),
        views=view_records(plan, tensors.tensors, placement.tensors),
        files=tuple(FileRecord(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in files.items()),
        order=plan.kind,
        chunk_bytes=options.chunk_bytes,
    )
    check_index(index)
    encoded = encode_index(index)
    for name, data in (*files.items(), (INDEX_NAME, encoded)):
        _write_durable(target / name, data)
    sync_directory(target)
    return index_digest(encoded)


def open_source(directory: Path) -> TensorSource:
    """The weights of a Hugging Face directory, whatever their format."""
    kind, files = source_files(directory)
    if kind == "torch":
        from sllm_loaderd.convert.torch_files import TorchSource

        return TorchSource(files)
    from sllm_loaderd.convert.safetensors import SafetensorsSource

    return SafetensorsSource(files)


def _plan(directory: Path, source: TensorSource) -> StoragePlan:
    from sllm_loaderd.convert.module import module_plan

    def same_bytes(a: str, b: str) -> bool:
        return _same_bytes(source, a, b)

    module = module_plan(directory, {name: tensor.shape for name, tensor in source.tensors.items()})
    return plan_storage(source.tensors, source.ties, module, same_bytes)


def _same_bytes(source: TensorSource, a: str, b: str) -> bool:
    nbytes = source.tensors[a].nbytes
    one, two = bytearray(_COMPARE_BYTES), bytearray(_COMPARE_BYTES)
    for start in range(0, nbytes, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, nbytes - start)
        source.read(a, start, memoryview(one)[:count])
        source.read(b, start, memoryview(two)[:count])
        if one[:count] != two[:count]:
            return False
    return True


def _write_partition(
    target: Path,
    source: TensorSource,
    plan: StoragePlan,
    placement: Placement,
    options: ConvertOptions,
    progress: Progress | None,
) -> PartitionRecord:
    with PartitionWriter(target / partition_name(0), 0, options.chunk_bytes) as writer:
        for record in placement.tensors:
            writer.pad_to(record.offset)
            for part in plan.stored[record.name].parts:
                _copy(source, part, writer)
            if writer.offset != record.offset + record.nbytes:
                raise InvalidCheckpoint(f"tensor {record.name!r} has other bytes than its shape", field=record.name)
            if progress is not None:
                progress(writer.offset, placement.nbytes)
        record_of_all = writer.finish(placement.nbytes)
    if progress is not None:
        progress(placement.nbytes, placement.nbytes)
    return record_of_all


def _copy(source: TensorSource, name: str, writer: PartitionWriter) -> None:
    nbytes = source.tensors[name].nbytes
    start = 0
    while start < nbytes:
        with writer.space as space:
            count = min(len(space), nbytes - start)
            with space[:count] as view:
                source.read(name, start, view)
        writer.advance(count)
        start += count


def _write_durable(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
