"""The tensors of a checkpoint over its mapped bytes, by name."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from sllm_runtime.protocol.checkpoint import CheckpointIndex, TensorRecord
from sllm_runtime.protocol.errors import UnsupportedModel

_FLOATING: Final = frozenset({"float16", "bfloat16", "float32", "float64"})


class CheckpointTensors:
    """The tensors of one rank over its mapped bytes (``memory`` keeps the mapping, each tensor keeps ``memory``).

    Tensors are views: they may be made before their bytes are there, and read after.
    """

    def __init__(self, index: CheckpointIndex, memory: ctypes.Array[ctypes.c_ubyte], rank: int = 0) -> None:
        self._records = {record.name: record for record in (*index.views, *index.tensors) if record.rank == rank}
        self._aliases = {alias.name: alias.of for alias in index.aliases}
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8) if len(memory) else None
        self._wholes: dict[str, torch.Tensor] = {}

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
        if self._bytes is None or record.nbytes == 0:
            return torch.empty(record.shape, dtype=dtype)
        whole = self.whole(record.dtype)
        return whole.as_strided(record.shape, record.stride, record.offset // dtype.itemsize)

    def whole(self, name: str) -> torch.Tensor:
        """All bytes as numbers of one dtype: seen so once, it takes one call of torch for each tensor."""
        if name not in self._wholes:
            assert self._bytes is not None
            self._wholes[name] = self._bytes.view(torch_dtype(name))
        return self._wholes[name]

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
        self._copies: torch.Tensor | None = None

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
        if self._copies is None:  # address space: a page of it becomes memory when something is copied there
            self._copies = torch.empty(self._tensors.whole(record.dtype).shape, dtype=self._dtype)
        made = self._copies.as_strided(record.shape, record.stride, record.offset // tensor.element_size())
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


def torch_dtype(name: str) -> torch.dtype:
    """Torch's dtype of that name. Raises ``UnsupportedModel``."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModel(f"this torch has no dtype {name!r}")
    return dtype
