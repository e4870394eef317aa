"""Pieces of tensors: which bytes of a row-major tensor a rank has, and copying them in few, long reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from sllm_loaderd.convert.source import TensorSource
from sllm_loaderd.convert.writer import PartitionWriter
from sllm_runtime.protocol.limits import KIB, MIB

_LONG_READ: Final = 64 * KIB
"""Runs of at least this many bytes are read one by one; shorter ones are cut out of whole rows."""
_WINDOW: Final = 4 * MIB

Read = Callable[[int, memoryview], None]
"""Fills the view with a tensor's bytes from a start on."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Indices ``[start, stop)`` of dimension ``dim`` of a tensor of ``shape``, whose items have ``item`` bytes."""

    shape: tuple[int, ...]
    item: int
    dim: int
    start: int
    stop: int

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of the piece."""
        return (*self.shape[: self.dim], self.stop - self.start, *self.shape[self.dim + 1 :])

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return prod(self.part_shape) * self.item


class PartsReader:
    """Bytes of a stored tensor, which is one or more source tensors one behind the other."""

    def __init__(self, source: TensorSource, parts: Sequence[str]) -> None:
        self._source = source
        self._parts = [(name, source.tensors[name].nbytes) for name in parts]

    def __call__(self, start: int, view: memoryview) -> None:
        """Fill ``view`` from byte ``start`` on. Raises the source's errors."""
        for name, nbytes in self._parts:
            if start >= nbytes:
                start -= nbytes
                continue
            count = min(nbytes - start, len(view))
            self._source.read(name, start, view[:count])
            view, start = view[count:], 0
            if not len(view):
                return


def copy_range(read: Read, start: int, nbytes: int, writer: PartitionWriter) -> Iterator[None]:
    """Copy bytes ``[start, start + nbytes)`` of a tensor straight into the writer's chunk; yields after each read."""
    end = start + nbytes
    while start < end:
        with writer.space as space:
            count = min(len(space), end - start)
            with space[:count] as view:
                read(start, view)
        writer.advance(count)
        start += count
        yield


def copy_piece(read: Read, piece: Piece, writer: PartitionWriter) -> Iterator[None]:
    """Copy a piece in row-major order; yields after each read."""
    outer = prod(piece.shape[: piece.dim])
    inner = prod(piece.shape[piece.dim + 1 :]) * piece.item
    row, first, run = piece.shape[piece.dim] * inner, piece.start * inner, (piece.stop - piece.start) * inner
    if not run or not outer:
        return
    if outer == 1 or run >= _LONG_READ or row > _WINDOW:
        for number in range(outer):
            yield from copy_range(read, number * row + first, run, writer)
        return
    import numpy as np  # the daemon imports this package, and never splits a tensor

    at_once = min(_WINDOW // row, outer)
    buffer = np.empty((at_once, row), dtype=np.uint8)
    for number in range(0, outer, at_once):
        rows = buffer[: min(at_once, outer - number)]
        read(number * row, rows.reshape(-1).data)
        writer.put(np.ascontiguousarray(rows[:, first : first + run]).reshape(-1).data)
        yield
