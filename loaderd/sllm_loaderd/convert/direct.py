"""An index for safetensors files as they are: nothing is converted, nothing but headers is read.

Each file lies whole, header included, at a border of 4 KiB of a partition that exists nowhere as such. Execution order
comes from the module as in a conversion; a block names its tensors, since they lie apart.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import xxhash

from sllm_loaderd.convert.execution import execution_plan
from sllm_loaderd.convert.plan import StoragePlan, alias_records, plan_storage
from sllm_loaderd.convert.safetensors import MAX_HEADER, parse_header, torch_tensors
from sllm_loaderd.convert.shards import check_shards, weights_of
from sllm_loaderd.convert.source import SourceTensor
from sllm_loaderd.files import MAX_SMALL_FILE, is_small_file, sync_directory, write_durable
from sllm_loaderd.layout import MIN_BLOCK, place
from sllm_loaderd.sources import Entry, Source
from sllm_loaderd.sources.listing import read_whole
from sllm_runtime.protocol.checkpoint import (
    BLOCK_ALIGN,
    INDEX_NAME,
    ITEM_BYTES,
    MAX_INDEX,
    BlockRecord,
    CheckpointIndex,
    FileRecord,
    PartitionRecord,
    SegmentRecord,
    TensorRecord,
    align,
    check_index,
    contiguous_stride,
    encode_index,
    index_digest,
)
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from sllm_runtime.protocol.limits import CHUNK_BYTES, KIB

_AHEAD: Final = 256 * KIB
"""Read at once of each file; most headers are within."""
_SAMPLES: Final = 64


@dataclass(slots=True)
class _Files:
    """What the headers say: tensors as the source names them, and where each lies in the partition."""

    tensors: dict[str, SourceTensor] = field(default_factory=dict)
    offsets: dict[str, int] = field(default_factory=dict)
    file_of: dict[str, str] = field(default_factory=dict)
    segments: list[SegmentRecord] = field(default_factory=list)
    end: int = 0


def index_directly(
    source: Source,
    entries: Sequence[Entry],
    target: Path,
    *,
    chunk_bytes: int = CHUNK_BYTES,
    min_block: int = MIN_BLOCK,
    progress: Callable[[int, int], None] | None = None,
) -> str:
    """Write index and small files of the safetensors model ``entries`` into the new directory ``target``.

    Returns the model's digest. Raises ``UnsupportedModel`` for what has to be converted: no safetensors, tensors that
    are not at a multiple of their items, tensors that the module holds fused, LoRA adapters, whose index says what they
    are. Raises ``InvalidCheckpoint`` else.
    """
    target.mkdir()
    if {"adapter_config.json", "adapter_model.safetensors"} <= {entry.name for entry in entries}:
        raise UnsupportedModel(f"{source.uri} is a LoRA adapter")
    files = _take_small_files(source, entries, target)
    found = _read_headers(source, entries, progress)
    plan = _plan(target, found)
    index = CheckpointIndex(
        partitions=(PartitionRecord(0, align(found.end, BLOCK_ALIGN), ()),),
        blocks=_blocks(plan, min_block),
        tensors=tuple(_record(plan, found, name) for name in plan.stored),
        aliases=alias_records(plan),
        files=files,
        segments=tuple(found.segments),
        order=plan.kind,
        chunk_bytes=chunk_bytes,
    )
    check_index(index)
    encoded = encode_index(index)
    write_durable(target / INDEX_NAME, encoded)
    sync_directory(target)
    return index_digest(encoded)


def _take_small_files(source: Source, entries: Sequence[Entry], target: Path) -> tuple[FileRecord, ...]:
    records = []
    for entry in entries:
        if is_small_file(entry.name):
            data = read_whole(source, entry, MAX_SMALL_FILE)
            write_durable(target / entry.name, data)
            records.append(FileRecord(entry.name, len(data), hashlib.sha256(data).hexdigest()))
    return tuple(records)


def _read_headers(source: Source, entries: Sequence[Entry], progress: Callable[[int, int], None] | None) -> _Files:
    by_name = {entry.name: entry for entry in entries}
    chosen = weights_of(by_name, lambda name: read_whole(source, by_name[name], MAX_INDEX))
    wanted, names = chosen or (None, sorted(name for name in by_name if name.endswith(".safetensors")))
    if not names:
        raise UnsupportedModel(f"{source.uri} has no safetensors, which alone are loaded without a conversion")
    found = _Files()
    for number, name in enumerate(names):
        if name not in by_name:
            raise InvalidCheckpoint(f"{source.uri}: shard {name} is not there", field=name)
        _read_header(source, by_name[name], number, found)
        if progress is not None:
            progress(number + 1, len(names))
    if wanted is not None:
        check_shards(wanted, found.file_of)
    return found


def _read_header(source: Source, entry: Entry, number: int, found: _Files) -> None:
    start = align(found.end, BLOCK_ALIGN)
    with contextlib.closing(source.open(entry)) as opened:
        head = bytearray(min(_AHEAD, entry.nbytes))
        opened.read(memoryview(head), 0)
        length = int.from_bytes(head[:8], "little")
        if len(head) < 8 or length > min(MAX_HEADER, entry.nbytes - 8):
            raise InvalidCheckpoint(f"{opened.name}: header of {length} bytes in a file of {entry.nbytes}")
        if 8 + length > len(head):
            head += bytearray(8 + length - len(head))
            opened.read(memoryview(head)[_AHEAD:], _AHEAD)
        tag = entry.etag if source.local() is None else _sampled(opened.read, entry.nbytes)
    header = parse_header(head[8 : 8 + length], entry.nbytes - 8 - length, Path(entry.name))
    found.segments.append(SegmentRecord(entry.name, 0, start, entry.nbytes, tag))
    for tensor in torch_tensors(header, number):
        if tensor.name in found.tensors:
            raise InvalidCheckpoint(f"tensor {tensor.name!r} stands in two shards", field=tensor.name)
        offset = start + 8 + length + tensor.position[1]
        if offset % ITEM_BYTES[tensor.dtype]:
            raise UnsupportedModel(
                f"tensor {tensor.name!r} of {entry.name} is at no multiple of its items; convert the model",
                field=tensor.name,
            )
        found.tensors[tensor.name] = tensor
        found.offsets[tensor.name] = offset
        found.file_of[tensor.name] = entry.name
    found.end = start + entry.nbytes


def _sampled(read: Callable[[memoryview, int], str], nbytes: int) -> str:
    """A digest of pages all over a file: another fine-tune has another one, the same file has it on every node."""
    digest = xxhash.xxh3_128(nbytes.to_bytes(8, "little"))
    count = min(BLOCK_ALIGN, nbytes)
    page = bytearray(count)
    for number in range(_SAMPLES):
        read(memoryview(page), (nbytes - count) * number // (_SAMPLES - 1) // BLOCK_ALIGN * BLOCK_ALIGN)
        digest.update(page)
    return f"xxh3:{digest.hexdigest()}"


def _plan(directory: Path, found: _Files) -> StoragePlan:
    module = execution_plan(directory, {name: tensor.shape for name, tensor in found.tensors.items()})
    # Two names with the same bytes are not looked for: that would be to read them.
    plan = plan_storage(found.tensors, {}, module, lambda one, two: False, by_names=True)
    fused = next((name for name, stored in plan.stored.items() if stored.parts != (name,)), None)
    if fused is not None:
        raise UnsupportedModel(f"the module holds {fused!r} fused, the files in parts; convert the model", field=fused)
    return plan


def _record(plan: StoragePlan, found: _Files, name: str) -> TensorRecord:
    tensor = plan.stored[name].tensor
    stride = contiguous_stride(tensor.shape)
    return TensorRecord(name, 0, found.offsets[name], tensor.nbytes, tensor.dtype, tensor.shape, stride)


def _blocks(plan: StoragePlan, min_block: int) -> tuple[BlockRecord, ...]:
    """The blocks that a conversion would make, each with the names of its tensors in place of its range."""
    placement = place(plan.order, [stored.tensor for stored in plan.stored.values()], plan.ties, min_block=min_block)
    starts = iter(placement.tensors)
    tensor = next(starts, None)
    blocks = []
    for block in placement.blocks:
        own = []
        while tensor is not None and (tensor.offset < block.offset + block.nbytes or not tensor.nbytes):
            own.append(tensor.name)
            tensor = next(starts, None)
        blocks.append(BlockRecord(0, 0, 0, block.layers, (*own, *block.shared)))
    return tuple(blocks)
