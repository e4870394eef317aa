"""The tensors of a checkpoint over its mapped bytes, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch

from sllm_runtime.protocol.checkpoint import CheckpointIndex, TensorRecord
from sllm_runtime.protocol.errors import UnsupportedModel

_FLOATING: Final = frozenset({"float16", "bfloat16", "float32", "float64"})


class CheckpointTensors:
    """The tensors of one rank over its bytes (``memory``, from ``PartitionMemory.exporter``, keeps their mapping, each
    tensor keeps ``memory``), and of the ranks ``beside`` it, each where its own bytes are.

    Tensors are views: they may be made before their bytes are there, and read after. Raises ``UnsupportedModel`` if
    there are several ranks and one tensor's bytes are in more than one of them.
    """

    def __init__(
        self, index: CheckpointIndex, memory: Any, rank: int = 0, *, beside: Mapping[int, Any] = MappingProxyType({})
    ) -> None:
        memories = {rank: memory, **beside}
        if beside:
            _refuse_splits(index)
        records = (*index.views, *index.tensors)  # what several ranks have is taken from the first
        self._records = {each.name: each for rank in sorted(memories, reverse=True) for each in records
                         if each.rank == rank}  # fmt: skip
        self._aliases = {alias.name: alias.of for alias in index.aliases}
        self._bytes = {rank: found for rank, held in memories.items() if (found := _bytes_of(held)) is not None}
        self._wholes: dict[tuple[int, str], torch.Tensor] = {}
        self.devices = tuple(dict.fromkeys(held.device for held in self._bytes.values())) or (torch.device("cpu"),)
        """Where the bytes are, by rank; partitions of fake devices are on the CPU."""

    def find(self, name: str) -> TensorRecord | None:
        """The record that ``name`` or its alias stands for."""
        return self._records.get(self._aliases.get(name, name)) or self._records.get(name)

    @property
    def names(self) -> frozenset[str]:
        """Every name the checkpoint knows."""
        return frozenset((*self._records, *self._aliases))

    def tensor(self, record: TensorRecord) -> torch.Tensor:
        """The tensor of ``record``, sharing its memory."""
        dtype = torch_dtype(record.dtype)
        if record.nbytes == 0:
            return torch.empty(record.shape, dtype=dtype)
        whole = self.whole(record)
        return whole.as_strided(record.shape, record.stride, record.offset // dtype.itemsize)

    def whole(self, record: TensorRecord) -> torch.Tensor:
        """All bytes of its rank as numbers of its dtype: seen so once, it takes one call of torch for each tensor."""
        key = (record.rank, record.dtype)
        if key not in self._wholes:
            self._wholes[key] = self._bytes[record.rank].view(torch_dtype(record.dtype))
        return self._wholes[key]

    def floating_dtype(self) -> torch.dtype:
        """The floating dtype that most bytes have."""
        sizes: dict[torch.dtype, int] = {}
        for record in self._records.values():
            dtype = torch_dtype(record.dtype)
            if dtype.is_floating_point:
                sizes[dtype] = sizes.get(dtype, 0) + record.nbytes
        return max(sizes, key=lambda dtype: sizes[dtype]) if sizes else torch.float32


class TypedTensors(Mapping[str, torch.Tensor]):
    """Tensors by every name that the checkpoint knows, ties the same object. One of another dtype than ``dtype`` is
    copied when it is asked for, which reads its bytes; all others are views."""

    def __init__(self, tensors: CheckpointTensors, dtype: torch.dtype) -> None:
        self._tensors, self._dtype = tensors, dtype
        self._made: dict[str, torch.Tensor] = {}
        self._common = tensors.floating_dtype()
        self._copies: dict[int, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        record = self._tensors.find(name)
        if record is None:
            raise KeyError(name)
        made = self._made.get(record.name)
        if made is None:
            made = self._tensors.tensor(record)
            if made.dtype != self._dtype:
                alone = made.dtype != self._common or not record.nbytes
                made = made.to(self._dtype) if alone else self._copied(record, made)
            self._made[record.name] = made
        return made

    def _copied(self, record: TensorRecord, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in ``dtype`` with the neighbours that the tensor has: then several make one product, as views do."""
        copies = self._copies.get(record.rank)
        if copies is None:  # address space: a page of it becomes memory when something is copied there
            whole = self._tensors.whole(record)
            copies = self._copies[record.rank] = torch.empty(whole.shape, dtype=self._dtype, device=whole.device)
        made = copies.as_strided(record.shape, record.stride, record.offset // tensor.element_size())
        made.copy_(tensor)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors.names)

    def __len__(self) -> int:
        return len(self._tensors.names)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Of a tensor that need not be there yet; None where there is none of that name."""
        record = self._tensors.find(name)
        return None if record is None else record.shape

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """By name; what is not of floating numbers has none, since it means something else than its numbers."""
        found = {name: self._tensors.find(name) for name in self}
        return {name: each.shape for name, each in found.items() if each is not None and each.dtype in _FLOATING}


def _bytes_of(memory: Any) -> torch.Tensor | None:
    if hasattr(memory, "__cuda_array_interface__"):
        return torch.as_tensor(memory, device=memory.device)
    return torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else None


def _refuse_splits(index: CheckpointIndex) -> None:
    split = next((split for split in index.splits if split.dim is not None), None)
    if split is not None:
        raise UnsupportedModel(
            f"tensor {split.name!r} is shared out over {len(split.ranks)} partitions (layout {index.layout}), and one "
            f"worker does not join them; deploy it with parallelism={{'tensor': {len(index.partitions)}}}, or the "
            "model in one partition or in runs of layers (--plan auto-layers:N)",
            field=split.name,
        )


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of that name. Raises ``UnsupportedModel``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModel(f"this torch has no dtype {name!r}")
    return dtype
