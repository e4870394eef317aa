"""Tensors over a load's memory: no byte is copied, wherever the memory is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from sllm_loaderd.client import SessionLoad
from sllm_runtime.protocol.checkpoint import CheckpointIndex, TensorRecord
from sllm_runtime.protocol.errors import UnsupportedModel


class BoundTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Ties are the same object; source names of parts of fused tensors are made when asked for.

    ``base`` holds the partition's bytes, uint8 [nbytes], on any device. Each tensor keeps the memory alive by itself.
    """

    def __init__(self, index: CheckpointIndex, rank: int, base: torch.Tensor) -> None:
        self._base = base
        self._by_dtype: dict[str, torch.Tensor] = {}
        self._tensors = {t.name: self._tensor(t) for t in index.tensors if t.rank == rank}
        for alias in index.aliases:
            if alias.of in self._tensors:
                self._tensors[alias.name] = self._tensors[alias.of]
        self._views = {view.name: view for view in index.views if view.rank == rank}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = self._tensor(self._views[name])
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from (name for name in self._views if name not in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors) + sum(name not in self._tensors for name in self._views)

    def _tensor(self, record: TensorRecord) -> torch.Tensor:
        """One call of torch for each tensor: the bytes are seen as each dtype once, offsets are whole elements."""
        whole = self._by_dtype.get(record.dtype)
        if whole is None:
            whole = self._by_dtype[record.dtype] = self._base.view(_torch_dtype(record))
        if not record.nbytes:
            return torch.empty(record.shape, dtype=whole.dtype, device=whole.device)
        return whole.as_strided(record.shape, record.stride, record.offset // whole.element_size())


def base_tensor(exporter: Any) -> torch.Tensor:
    """The bytes of a ``PartitionMemory``'s exporter: uint8 [nbytes], where they are."""
    if hasattr(exporter, "__cuda_array_interface__"):
        return torch.as_tensor(exporter, device=exporter.device)
    if not len(exporter):
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(exporter, dtype=torch.uint8)


def bind(load: SessionLoad, timeout: float = 60.0) -> BoundTensors:
    """Tensors over the memory of ``load``; not to be read before ``load.wait`` for their block.

    Raises ``DeadlineExceeded`` or the load's error.
    """
    exporter = load.attach(timeout).exporter()
    return BoundTensors(load.index(timeout), load.partition, base_tensor(exporter))


def _torch_dtype(record: TensorRecord) -> torch.dtype:
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModel(f"tensor {record.name!r} is {record.dtype}, which this torch does not have")
    return dtype
