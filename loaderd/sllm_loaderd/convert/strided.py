"""Row-major bytes of strided tensors over a buffer, window by window: nothing is made contiguous as a whole."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_ITEMS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
_WORDS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class Strided:
    """Shape and stride in elements, ``offset`` in bytes of the buffer. ``conjugate`` and ``negative`` are torch's flags
    of a tensor whose bytes are to be read with another sign; ``halves`` 2 for complex dtypes."""

    offset: int
    item: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    halves: int = 1
    conjugate: bool = False
    negative: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor when it is contiguous."""
        return prod(self.shape) * self.item


def read_strided(buffer: mmap.mmap | memoryview, tensor: Strided, start: int, view: memoryview) -> None:
    """Fill ``view`` with the row-major bytes of ``tensor`` from byte ``start`` on."""
    if not len(view):
        return  # a shape with a size of zero has no rows to count by
    strides = tuple(step * tensor.item for step in tensor.stride)
    whole: npt.NDArray[Any] = np.ndarray(tensor.shape, _ITEMS[tensor.item], buffer, tensor.offset, strides)
    first, last = start // tensor.item, -(-(start + len(view)) // tensor.item)
    out = np.empty(last - first, dtype=_ITEMS[tensor.item])
    _fill(whole, first, out)
    _change_signs(tensor, out)
    skip = start - first * tensor.item
    view[:] = out.view("u1").data[skip : skip + len(view)]


def _fill(array: npt.NDArray[Any], first: int, out: npt.NDArray[Any]) -> None:
    """Elements ``first`` and following of ``array``, in row-major order, as many as ``out`` takes."""
    if array.ndim <= 1:
        out[:] = array.reshape(-1)[first : first + len(out)]
        return
    inner = prod(array.shape[1:])
    row, begin, done = first // inner, first % inner, 0
    if begin:  # the rest of a row
        done = min(inner - begin, len(out))
        _fill(array[row], begin, out[:done])
        row += 1
    rows = (len(out) - done) // inner
    if rows:
        np.copyto(out[done : done + rows * inner].reshape(rows, *array.shape[1:]), array[row : row + rows])
        done, row = done + rows * inner, row + rows
    if done < len(out):
        _fill(array[row], 0, out[done:])


def _change_signs(tensor: Strided, out: npt.NDArray[Any]) -> None:
    word = tensor.item // tensor.halves
    words = out.view(_WORDS[word]) if tensor.negative or tensor.conjugate else out
    sign = 1 << (8 * word - 1)
    if tensor.negative:
        words ^= words.dtype.type(sign)
    if tensor.conjugate:
        words[1::2] ^= words.dtype.type(sign)
