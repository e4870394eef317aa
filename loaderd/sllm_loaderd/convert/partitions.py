"""Writes the partitions of a checkpoint, one per rank, and gives the records of what lies where."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sllm_loaderd.convert.pieces import PartsReader, Piece, copy_piece, copy_range
from sllm_loaderd.convert.plan import StoragePlan, view_records
from sllm_loaderd.convert.ranks import Share
from sllm_loaderd.convert.source import TensorSource
from sllm_loaderd.convert.writer import PartitionWriter
from sllm_loaderd.layout import Placement, PlannedTensor, complete_order, layer_numbers, place
from sllm_runtime.protocol.checkpoint import (
    ITEM_BYTES,
    BlockRecord,
    PartitionRecord,
    SplitRecord,
    TensorRecord,
    partition_name,
    piece_bounds,
)
from sllm_runtime.protocol.errors import InvalidCheckpoint

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one rank holds; ``pieces`` are those of its tensors that are split."""

    rank: int
    placement: Placement
    pieces: Mapping[str, Piece]


@dataclass(frozen=True, slots=True)
class Written:
    """The records of what was written."""

    partitions: tuple[PartitionRecord, ...]
    blocks: tuple[BlockRecord, ...]
    tensors: tuple[TensorRecord, ...]
    views: tuple[TensorRecord, ...]
    splits: tuple[SplitRecord, ...]


def full_order(plan: StoragePlan) -> list[str]:
    """Every tensor and tie of ``plan`` in execution order."""
    return complete_order(plan.order, {name: stored.tensor for name, stored in plan.stored.items()}, plan.ties)


def lay_out(plan: StoragePlan, shares: Mapping[str, Share], ranks: int, min_block: int) -> list[RankLayout]:
    """Place each rank's tensors. Layers keep the number that they have in the whole model."""
    order = full_order(plan)
    numbers = layer_numbers(order)
    layouts = []
    for rank in range(ranks):
        pieces, tensors = {}, []
        for name, stored in plan.stored.items():
            share = shares[name]
            if rank not in share.ranks:
                continue
            piece = _piece(stored.tensor, share, rank)
            if piece is not None:
                pieces[name] = piece
            tensors.append(_part(stored.tensor, piece))
        ties = {name: of for name, of in plan.ties.items() if rank in shares[name].ranks}
        later = {of for name, of in ties.items() if shares[of].ranks[0] not in shares[name].ranks}
        own = _used_by_ties(order, ties, later)
        placement = place(own, tensors, ties, rank=rank, min_block=min_block, numbers=numbers)
        layouts.append(RankLayout(rank, placement, pieces))
    return layouts


def _used_by_ties(order: Sequence[str], ties: Mapping[str, str], later: Collection[str]) -> list[str]:
    """The order of a rank that has the tensors ``later`` only for what is tied to them: each just before that."""
    names: list[str] = []
    for name in order:
        if ties.get(name) in later:
            names.append(ties[name])
        if name not in later:
            names.append(name)
    return list(dict.fromkeys(names))


def _piece(tensor: PlannedTensor, share: Share, rank: int) -> Piece | None:
    if share.dim is None:
        return None
    count = tensor.granules(share.dim)
    unit = tensor.shape[share.dim] // count if count else 1
    start, stop = piece_bounds(count, len(share.ranks))[share.ranks.index(rank)]
    return Piece(tensor.shape, ITEM_BYTES[tensor.dtype], share.dim, start * unit, stop * unit)


def _part(tensor: PlannedTensor, piece: Piece | None) -> PlannedTensor:
    return tensor if piece is None else PlannedTensor(tensor.name, tensor.dtype, piece.part_shape, piece.nbytes)


def write_partitions(
    target: Path,
    source: TensorSource,
    plan: StoragePlan,
    shares: Mapping[str, Share],
    layouts: Sequence[RankLayout],
    chunk_bytes: int,
    progress: Progress | None,
) -> Written:
    """Write the partitions, each durable. Raises the source's errors, or ``InvalidCheckpoint``."""
    total, done, partitions = sum(layout.placement.nbytes for layout in layouts), 0, []
    for layout in layouts:
        with PartitionWriter(target / partition_name(layout.rank), layout.rank, chunk_bytes) as writer:
            for _ in _write(writer, source, plan, layout):
                if progress is not None:
                    progress(done + writer.offset, total)
            partitions.append(writer.finish(layout.placement.nbytes))
        done += layout.placement.nbytes
    if progress is not None:
        progress(total, total)
    placed = [(record, _begin(record, layout)) for layout in layouts for record in layout.placement.tensors]
    return Written(
        partitions=tuple(partitions),
        blocks=tuple(block for layout in layouts for block in layout.placement.blocks),
        tensors=tuple(record for record, _ in placed),
        views=view_records(plan, source.tensors, placed),
        splits=_splits(plan, shares),
    )


def _splits(plan: StoragePlan, shares: Mapping[str, Share]) -> tuple[SplitRecord, ...]:
    return tuple(
        SplitRecord(name, stored.tensor.shape, shares[name].ranks, shares[name].dim)
        for name, stored in plan.stored.items()
        if len(shares[name].ranks) > 1
    )


def _write(writer: PartitionWriter, source: TensorSource, plan: StoragePlan, layout: RankLayout) -> Iterator[None]:
    """Write one partition's tensors; gives control back after each window of bytes that went by."""
    for record in layout.placement.tensors:
        writer.pad_to(record.offset)
        read = PartsReader(source, plan.stored[record.name].parts)
        piece = layout.pieces.get(record.name)
        yield from (copy_range(read, 0, record.nbytes, writer) if piece is None else copy_piece(read, piece, writer))
        if writer.offset != record.offset + record.nbytes:
            raise InvalidCheckpoint(f"tensor {record.name!r} has other bytes than its shape", field=record.name)


def _begin(record: TensorRecord, layout: RankLayout) -> int | None:
    """The byte of the whole tensor at which this part begins; None if it is not one run of its bytes."""
    piece = layout.pieces.get(record.name)
    if piece is None:
        return 0
    if piece.dim > 0:
        return None
    return piece.start * (piece.nbytes // max(piece.stop - piece.start, 1))
