"""Whole tensors out of a checkpoint's partitions: what a split put apart is joined again, by what the index says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from sllm_loaderd.disk.local import LocalPartition
from sllm_runtime.protocol.checkpoint import ITEM_BYTES, CheckpointIndex, SplitRecord, TensorRecord, contiguous_stride
from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.protocol.limits import MIB

_WINDOW: Final = 4 * MIB


class WholeTensors:
    """Reads the tensors of a checkpoint whose index is checked. Holds its partitions open until ``close``."""

    def __init__(self, directory: Path, index: CheckpointIndex) -> None:
        self._splits: Mapping[str, SplitRecord] = {split.name: split for split in index.splits}
        self._records: dict[str, dict[int, TensorRecord]] = {}
        for record in index.tensors:
            self._records.setdefault(record.name, {})[record.rank] = record
        self._files: list[LocalPartition] = []
        try:
            for partition in index.partitions:
                self._files.append(LocalPartition(directory, partition.rank, partition.nbytes))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give the descriptors back; repeatable."""
        while self._files:
            self._files.pop().close()

    def copies(self, name: str) -> list[Iterator[memoryview]]:
        """The row-major bytes of the tensor ``name`` in windows: once for each rank that has it whole, or joined."""
        parts = self._records[name]
        if any(record.stride != contiguous_stride(record.shape) for record in parts.values()):
            raise InvalidCheckpoint(f"tensor {name!r} is not contiguous and has no row-major bytes", field=name)
        split = self._splits.get(name)
        if split is None or split.dim is None:
            return [self._run(record.rank, record.offset, record.nbytes) for record in parts.values()]
        ordered = [parts[rank] for rank in split.ranks]
        return [self._joined(ordered, split.shape, split.dim)]

    def _run(self, rank: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        buffer = memoryview(bytearray(min(_WINDOW, nbytes)))
        for start in range(0, nbytes, _WINDOW):
            view = buffer[: min(_WINDOW, nbytes - start)]
            self._files[rank].read(view, offset + start)
            yield view

    def _joined(self, parts: list[TensorRecord], shape: tuple[int, ...], dim: int) -> Iterator[memoryview]:
        """One run of every part after the other, as often as there are indices before ``dim``."""
        outer, inner = prod(shape[:dim]), prod(shape[dim + 1 :]) * ITEM_BYTES[parts[0].dtype]
        runs = [part.shape[dim] * inner for part in parts]
        at_once = max(1, min(outer, _WINDOW // max(sum(runs), 1)))
        if outer == 1 or sum(runs) > _WINDOW:
            for number in range(outer):
                for part, run in zip(parts, runs, strict=True):
                    yield from self._run(part.rank, part.offset + number * run, run)
            return
        for number in range(0, outer, at_once):
            rows = min(at_once, outer - number)
            columns = [self._rows(p, number * run, rows, run) for p, run in zip(parts, runs, strict=True)]
            yield np.concatenate(columns, axis=1).reshape(-1).data

    def _rows(self, part: TensorRecord, start: int, rows: int, run: int) -> npt.NDArray[np.uint8]:
        data = np.empty((rows, run), dtype=np.uint8)
        if run:
            self._files[part.rank].read(data.reshape(-1).data, part.offset + start)
        return data
