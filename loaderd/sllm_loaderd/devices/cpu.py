"""The CPU: tensors point into the shared chunks, private and writable; a page that is written becomes a copy."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from typing import Final

import torch

from sllm_loaderd.client import SessionLoad
from sllm_runtime.protocol.checkpoint import CheckpointIndex, TensorRecord, extent
from sllm_runtime.protocol.errors import UnsupportedModel

NAME: Final = "cpu"


class BoundTensors(Mapping[str, torch.Tensor]):
    """Tensors by name. Ties are the same object; source names of parts of fused tensors are made when asked for.

    Each tensor keeps the memory alive by itself.
    """

    def __init__(self, index: CheckpointIndex, rank: int, buffer: ctypes.Array[ctypes.c_ubyte]) -> None:
        self._buffer = buffer
        self._tensors = {t.name: _tensor(buffer, t) for t in index.tensors if t.rank == rank}
        for alias in index.aliases:
            if alias.of in self._tensors:
                self._tensors[alias.name] = self._tensors[alias.of]
        self._views = {view.name: view for view in index.views if view.rank == rank}

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = _tensor(self._buffer, self._views[name])
        return found

    def __iter__(self) -> Iterator[str]:
        yield from self._tensors
        yield from (name for name in self._views if name not in self._tensors)

    def __len__(self) -> int:
        return len(self._tensors) + sum(name not in self._tensors for name in self._views)


class CpuDevice:
    """``Device`` for the CPU."""

    name = NAME

    def bind(self, load: SessionLoad, timeout: float = 60.0) -> BoundTensors:
        """Tensors over the memory of ``load``; not to be read before ``load.wait`` for their block."""
        mapping = load.attach(timeout)
        return BoundTensors(load.index(timeout), load.partition, mapping.exporter())


def _tensor(buffer: ctypes.Array[ctypes.c_ubyte], record: TensorRecord) -> torch.Tensor:
    dtype = getattr(torch, record.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedModel(f"tensor {record.name!r} is {record.dtype}, which this torch does not have")
    elements = extent(record.shape, record.stride)
    if not elements:
        return torch.empty(record.shape, dtype=dtype)
    flat = torch.frombuffer(buffer, dtype=dtype, count=elements, offset=record.offset)
    return flat.as_strided(record.shape, record.stride)
