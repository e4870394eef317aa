"""From what a source has and what the module says to what will be stored: pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from sllm_loaderd.convert.module_plan import ModulePlan
from sllm_loaderd.convert.source import SourceTensor
from sllm_loaderd.layout import PlannedTensor
from sllm_runtime.protocol.checkpoint import ITEM_BYTES, AliasRecord, TensorRecord, contiguous_stride

_NUMBERS: Final = re.compile("([0-9]{1,9})")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of the checkpoint and the source tensors whose bytes, one behind the other, are its own."""

    tensor: PlannedTensor
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoragePlan:
    """What to write: tensors (any order), the execution order of their names, ties and other names."""

    stored: Mapping[str, StoredTensor]
    order: tuple[str, ...]
    kind: str
    ties: Mapping[str, str]
    renamed: Mapping[str, str]
    """Module name → stored name."""


def plan_storage(
    tensors: Mapping[str, SourceTensor],
    source_ties: Mapping[str, str],
    module: ModulePlan | None,
    same_bytes: Callable[[str, str], bool],
    *,
    by_names: bool = False,
) -> StoragePlan:
    """``same_bytes`` compares two source tensors: a tie whose two names both stand in the files is stored once only
    if it is one. ``by_names``: without a module, order by the numbers in the names instead of the place in the files.
    """
    by_offset = sorted(tensors.values(), key=lambda tensor: tensor.position)
    if module is None:
        ordered = sorted(by_offset, key=lambda tensor: _natural(tensor.name)) if by_names else by_offset
        stored = {tensor.name: _plain(tensor) for tensor in ordered}
        return StoragePlan(stored, tuple(stored), "names" if by_names else "offset", dict(source_ties), {})
    stored = _fused(by_offset, tensors, module)
    names = {target: source for source, target in module.renamed.items()}
    ties = dict(source_ties)
    for group in module.ties:
        ties.update(_tie(group, stored, names, same_bytes))
    for name in ties:
        stored.pop(name, None)
    order = tuple(names.get(name, name) for name in module.order)
    kind = "traced" if module.traced else "module"
    return StoragePlan(stored, order, kind, ties, {name: ties.get(of, of) for name, of in names.items()})


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    parts = _NUMBERS.split(name)  # every second one is a number
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(parts)]


def _plain(tensor: SourceTensor) -> StoredTensor:
    return StoredTensor(
        PlannedTensor(tensor.name, tensor.dtype, tensor.shape, tensor.nbytes, tensor.granule), (tensor.name,)
    )


def _fused(
    by_offset: Iterable[SourceTensor], tensors: Mapping[str, SourceTensor], module: ModulePlan
) -> dict[str, StoredTensor]:
    stored: dict[str, StoredTensor] = {}
    inside: set[str] = set()
    for fusion in module.fusions:
        dtypes = {tensors[name].dtype for name in fusion.parts}
        if len(dtypes) == 1 and fusion.name not in tensors:
            nbytes = sum(tensors[name].nbytes for name in fusion.parts)
            planned = PlannedTensor(fusion.name, dtypes.pop(), fusion.shape, nbytes)
            stored[fusion.name] = StoredTensor(planned, fusion.parts)
            inside.update(fusion.parts)
    stored.update((tensor.name, _plain(tensor)) for tensor in by_offset if tensor.name not in inside)
    return stored


def _tie(
    group: tuple[str, ...],
    stored: Mapping[str, StoredTensor],
    names: Mapping[str, str],
    same_bytes: Callable[[str, str], bool],
) -> dict[str, str]:
    """Other names of the tensor that a tie group has in the files; the group's first one there is kept."""
    own = [names.get(name, name) for name in group]
    there = [name for name in own if name in stored]
    if not there:
        return {}
    first = there[0]
    return {
        name: first
        for name in own
        if name != first and (name not in stored or _equal(stored[first], stored[name], same_bytes))
    }


def _equal(a: StoredTensor, b: StoredTensor, same_bytes: Callable[[str, str], bool]) -> bool:
    one, two = a.tensor, b.tensor
    alike = (one.dtype, one.shape) == (two.dtype, two.shape) and len(a.parts) == len(b.parts) == 1
    return alike and same_bytes(a.parts[0], b.parts[0])


def alias_records(plan: StoragePlan) -> tuple[AliasRecord, ...]:
    """Ties and module names, ascending by name; what is itself a tensor's name is left out."""
    names = {name: of for name, of in (*plan.ties.items(), *plan.renamed.items()) if name not in plan.stored}
    return tuple(AliasRecord(name, of) for name, of in sorted(names.items()) if of in plan.stored)


def view_records(
    plan: StoragePlan, tensors: Mapping[str, SourceTensor], placed: Iterable[tuple[TensorRecord, int | None]]
) -> tuple[TensorRecord, ...]:
    """The source's names for the parts of fused tensors. With each record comes the byte of the whole tensor at which
    it begins, None where it is no run of its bytes."""
    views = []
    for record, begin in placed:
        parts = plan.stored[record.name].parts
        if parts == (record.name,) or begin is None:
            continue
        offset = record.offset - begin
        for part in (tensors[name] for name in parts):
            inside = record.offset <= offset and offset + part.nbytes <= record.offset + record.nbytes
            if inside and offset % ITEM_BYTES[part.dtype] == 0:
                stride = contiguous_stride(part.shape)
                views.append(TensorRecord(part.name, record.rank, offset, part.nbytes, part.dtype, part.shape, stride))
            offset += part.nbytes
    return tuple(views)
