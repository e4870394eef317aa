"""Where each tensor lies in its partition: pure functions from an ordered list of tensors to records and blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from sllm_runtime.protocol.checkpoint import (
    BLOCK_ALIGN,
    TENSOR_ALIGN,
    BlockRecord,
    TensorRecord,
    align,
    contiguous_stride,
)
from sllm_runtime.protocol.limits import MIB

MIN_BLOCK: Final = 1 * MIB
"""Consecutive layers are put into one block until it has this many bytes."""


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to be stored, in bytes; ``name`` is what the index will call it. ``granule``: so many indices of the
    innermost dimension belong together (the bytes of a packed block) and are never split."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    granule: int = 1

    def granules(self, dim: int) -> int:
        """Indices of dimension ``dim``, counted by what must stay together."""
        return self.shape[dim] // self.granule if dim == len(self.shape) - 1 else self.shape[dim]


@dataclass(frozen=True, slots=True)
class Placement:
    """The laid-out partition: records in the order of their bytes, blocks in execution order, padded size."""

    tensors: tuple[TensorRecord, ...]
    blocks: tuple[BlockRecord, ...]
    nbytes: int


@dataclass(slots=True)
class _Section:
    """Tensors of one layer (``layer`` is its number in execution order), or of what stands between layers."""

    layer: int | None
    tensors: list[PlannedTensor]
    uses: list[str]
    """Names stored in another section that this one needs as well."""


def layer_key(name: str) -> str | None:
    """The layer a tensor belongs to, by its name: all up to the first number that is a component of its own."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts[:-1]) if part.isdecimal()), None)
    return None if number is None else ".".join(parts[: number + 1]) + "."


def place(
    order: Sequence[str],
    tensors: Iterable[PlannedTensor],
    ties: Mapping[str, str],
    *,
    rank: int = 0,
    min_block: int = MIN_BLOCK,
    numbers: Mapping[str, int] | None = None,
) -> Placement:
    """Lay ``tensors``, those of one rank, out in execution order.

    ``order`` names tensors and ties (other names of a stored tensor, ``ties[name]``); what it leaves out follows
    behind, each in the section of its layer if it has one. ``numbers``: the number of each layer by its
    ``layer_key``, where this rank has not all of them.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    names = complete_order(order, by_name, ties)
    sections = _sections(names, by_name, ties, layer_numbers(names) if numbers is None else numbers)
    records: list[TensorRecord] = []
    blocks: list[BlockRecord] = []
    for group in _grouped(sections, min_block):
        start = end = align(records[-1].offset + records[-1].nbytes, BLOCK_ALIGN) if records else 0
        for tensor in (tensor for section in group for tensor in section.tensors):
            offset = align(end, TENSOR_ALIGN)
            records.append(_record(tensor, rank, offset))
            end = offset + tensor.nbytes
        blocks.append(_block(group, rank, start, align(end, BLOCK_ALIGN) - start))
    return Placement(tuple(records), tuple(blocks), blocks[-1].offset + blocks[-1].nbytes if blocks else 0)


def layer_numbers(names: Iterable[str]) -> dict[str, int]:
    """The layers that ``names`` belong to, numbered from 0 in the order in which they come."""
    keys = dict.fromkeys(key for key in map(layer_key, names) if key is not None)
    return {key: number for number, key in enumerate(keys)}


def complete_order(order: Sequence[str], by_name: Mapping[str, PlannedTensor], ties: Mapping[str, str]) -> list[str]:
    """``order`` without names that nobody knows, and behind it the tensors and ties that it leaves out."""
    known = [name for name in dict.fromkeys(order) if name in by_name or name in ties]
    seen = set(known)
    return known + [name for name in (*by_name, *ties) if name not in seen]


def _sections(
    names: Sequence[str], by_name: Mapping[str, PlannedTensor], ties: Mapping[str, str], numbers: Mapping[str, int]
) -> list[_Section]:
    sections: dict[tuple[str, int], _Section] = {}
    seen: set[str] = set()
    for name in names:
        key = layer_key(name)
        if key is None:
            section = sections.setdefault(("", len(seen)), _Section(None, [], []))
        else:
            seen.add(key)
            section = sections.setdefault((key, 0), _Section(numbers[key], [], []))
        if name in by_name:
            section.tensors.append(by_name[name])
        else:
            section.uses.append(ties[name])
    return list(sections.values())


def _grouped(sections: Iterable[_Section], min_block: int) -> Iterable[list[_Section]]:
    """Runs of sections that make one block: small neighbouring layers together, everything else alone."""
    group: list[_Section] = []
    size = 0
    for section in sections:
        joins = group and group[-1].layer is not None and section.layer == group[-1].layer + 1
        if group and not (joins and size < min_block):
            yield group
            group, size = [], 0
        group.append(section)
        size += sum(tensor.nbytes for tensor in section.tensors)
    if group:
        yield group


def _record(tensor: PlannedTensor, rank: int, offset: int) -> TensorRecord:
    return TensorRecord(
        tensor.name, rank, offset, tensor.nbytes, tensor.dtype, tensor.shape, contiguous_stride(tensor.shape)
    )


def _block(group: Sequence[_Section], rank: int, offset: int, nbytes: int) -> BlockRecord:
    first, last = group[0].layer, group[-1].layer
    inside = {tensor.name for section in group for tensor in section.tensors}
    shared = dict.fromkeys(name for section in group for name in section.uses if name not in inside)
    layers = None if first is None or last is None else (first, last)
    return BlockRecord(rank, offset, nbytes, layers, tuple(shared))
