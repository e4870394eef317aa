"""The bytes of one tensor as transformers wants them, window by window: order restored, blocks unpacked."""

from __future__ import annotations

from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sllm_loaderd.convert.gguf.architectures import HEADS, MINUS_ONE, TURNED, Target
from sllm_loaderd.convert.gguf.blocks import to_bfloat16, unpack
from sllm_loaderd.files import read_exactly
from sllm_runtime.protocol.checkpoint import ITEM_BYTES, QuantRecord
from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.protocol.limits import MIB

_AT_ONCE: Final = 128 * 1024
"""Elements that are unpacked at once: what they need stays in the cache."""
_STRIP_BYTES: Final = 8 * MIB
_MAX_UNIT: Final = 128 * MIB
"""Bytes of one head, or of one block's width of a turned matrix: these are in memory as a whole."""
_NUMPY: Final = {"float32": "<f4", "float16": "<f2", "float64": "<f8"}


class Values:
    """Reads one target. ``keep``: packed blocks stay as they are (not where a matrix has to be turned)."""

    def __init__(self, target: Target, fd: int, *, keep: bool) -> None:
        source = target.source
        self._target, self._fd = target, fd
        self._shape = source.shape if target.expert is None else source.shape[1:]
        self._nbytes = source.nbytes if target.expert is None else source.nbytes // source.shape[0]
        self._offset = source.offset + (target.expert or 0) * self._nbytes
        self.kept = keep and source.packed and target.change in ("", HEADS)
        self.dtype = "uint8" if self.kept else "bfloat16" if source.packed else source.kind
        self._unit: tuple[int, npt.NDArray[np.uint8]] | None = None
        self._check()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in elements of ``dtype``."""
        if self._target.change == TURNED:
            return (self._shape[1], self._shape[0])
        if self.kept:
            elements, nbytes = self._target.source.block
            return (*self._shape[:-1], self._shape[-1] // elements * nbytes)
        return self._shape

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def quant(self) -> QuantRecord | None:
        """What the packed bytes are, if they are kept."""
        return QuantRecord(self._target.name, self._target.source.kind, self._shape) if self.kept else None

    def read(self, start: int, view: memoryview) -> None:
        """Fill ``view`` with row-major bytes from ``start`` on."""
        if self._target.change == TURNED:
            self._read_turned(start, view)
        elif self.kept or (not self._target.source.packed and self._target.change != MINUS_ONE):
            self._read_raw(start, view)
        else:
            self._read_values(start, view)

    def _check(self) -> None:
        source, change = self._target.source, self._target.change
        if change == TURNED and len(self._shape) != 2:
            raise UnsupportedModel(f"tensor {source.name!r} of {self._shape} is no matrix", field=source.name)
        if change == MINUS_ONE and not source.packed and source.kind not in (*_NUMPY, "bfloat16"):
            raise UnsupportedModel(f"tensor {source.name!r} of {source.kind} is no norm", field=source.name)
        if change == HEADS and (source.packed and len(self._shape) < 2):
            raise UnsupportedModel(f"tensor {source.name!r} has rows inside its blocks", field=source.name)
        elements, nbytes = source.block
        unit = {HEADS: self._head_bytes, TURNED: prod(self._shape[:1]) * max(nbytes, 4 * elements)}.get(change, 0)
        if unit > _MAX_UNIT:
            raise UnsupportedModel(
                f"tensor {source.name!r} of {self._shape} has rows too big to move", field=source.name
            )

    @property
    def _head_bytes(self) -> int:
        return self._nbytes // max(self._target.heads, 1)

    def _pread(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        data = np.empty(nbytes, dtype=np.uint8)
        read_exactly(self._fd, data.data, self._offset + offset, self._target.source.name)
        return data

    # --- raw bytes, rows in transformers' order ---------------------------------------------------
    def _read_raw(self, start: int, view: memoryview) -> None:
        if self._target.change != HEADS:
            read_exactly(self._fd, view, self._offset + start, self._target.source.name)
            return
        done = 0
        while done < len(view):
            number, inside = divmod(start + done, self._head_bytes)
            count = min(self._head_bytes - inside, len(view) - done)
            view[done : done + count] = self._head(number).data[inside : inside + count]
            done += count

    def _head(self, number: int) -> npt.NDArray[np.uint8]:
        """The rows of one head: llama.cpp has (pair, half), transformers (half, pair)."""
        if self._unit is None or self._unit[0] != number:
            rows = self._shape[0] // self._target.heads
            stored = self._pread(number * self._head_bytes, self._head_bytes).reshape(rows // 2, 2, -1)
            self._unit = (number, np.ascontiguousarray(stored.swapaxes(0, 1)).reshape(-1))
        return self._unit[1]

    # --- numbers ----------------------------------------------------------------------------------
    def _read_values(self, start: int, view: memoryview) -> None:
        item = ITEM_BYTES[self.dtype]
        elements, nbytes = self._target.source.block
        end = start + len(view)
        first = start // item // elements * elements
        while first * item < end:
            last = min(first + _AT_ONCE, self._nbytes // nbytes * elements)
            raw = np.empty((last - first) // elements * nbytes, dtype=np.uint8)
            self._read_raw(first // elements * nbytes, raw.data)
            data = self._encoded(self._numbers(raw))
            begin, stop = max(start, first * item), min(end, last * item)
            view[begin - start : stop - start] = data.data[begin - first * item : stop - first * item]
            first = last

    def _numbers(self, raw: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
        """Numbers of whole blocks, with the offset of norms taken off: float32, or the source's own wider type."""
        kind = self._target.source.kind
        if self._target.source.packed:
            numbers: npt.NDArray[Any] = unpack(kind, raw)
        elif kind == "bfloat16":
            numbers = (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
        else:
            numbers = raw.view(_NUMPY[kind])
        return numbers - numbers.dtype.type(1) if self._target.change == MINUS_ONE else numbers

    def _encoded(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        if self.dtype == "bfloat16":
            return to_bfloat16(np.ascontiguousarray(numbers, dtype=np.float32)).view(np.uint8)
        return np.ascontiguousarray(numbers, dtype=_NUMPY[self.dtype]).reshape(-1).view(np.uint8)

    # --- turned matrices --------------------------------------------------------------------------
    def _read_turned(self, start: int, view: memoryview) -> None:
        rows, columns = self._shape
        row_bytes = rows * ITEM_BYTES[self.dtype]  # of the turned matrix
        elements = self._target.source.block[0]
        width = max(_STRIP_BYTES // max(rows * 4, 1) // elements, 1) * elements
        done = 0
        while done < len(view):
            number, inside = divmod(start + done, width * row_bytes)
            strip = self._strip(number, width, columns)
            count = min(len(strip) - inside, len(view) - done)
            view[done : done + count] = strip.data[inside : inside + count]
            done += count

    def _strip(self, number: int, width: int, columns: int) -> npt.NDArray[np.uint8]:
        """Columns ``[number * width, …)`` of the stored matrix, as rows."""
        if self._unit is None or self._unit[0] != number:
            elements, nbytes = self._target.source.block
            first, last = number * width, min((number + 1) * width, columns)
            stored = np.empty((self._shape[0], (last - first) // elements * nbytes), dtype=np.uint8)
            row = columns // elements * nbytes
            for place, part in enumerate(stored):
                begin = self._offset + place * row + first // elements * nbytes
                read_exactly(self._fd, part.data, begin, self._target.source.name)
            self._unit = (number, self._turned(stored))
        return self._unit[1]

    def _turned(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        if self._target.source.packed:
            numbers = self._numbers(stored.reshape(-1)).reshape(len(stored), -1)
            return self._encoded(np.ascontiguousarray(numbers.T).reshape(-1))
        items = stored.view(f"V{ITEM_BYTES[self.dtype]}").reshape(len(stored), -1)
        return np.ascontiguousarray(items.T).reshape(-1).view(np.uint8)
