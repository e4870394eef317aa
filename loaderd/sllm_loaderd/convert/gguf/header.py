"""The header of a GGUF file (versions 2 and 3): metadata, and where each tensor lies. Every number is checked."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final, TypeAlias

from sllm_loaderd.files import read_exactly
from sllm_runtime.protocol.checkpoint import MAX_BYTES, QUANT_BLOCKS, align
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel
from sllm_runtime.protocol.limits import MIB

Value: TypeAlias = "bool | int | float | str | list[Value]"

MAX_TENSORS: Final = 1_000_000
MAX_PAIRS: Final = 100_000
MAX_ARRAY_DEPTH: Final = 4
MAX_DIMENSIONS: Final = 4
MAX_HEADER: Final = 64 * MIB
"""What stands before the data: a vocabulary of 260,000 tokens and its merges take 20 MiB. A byte of metadata takes 17
here, and a file may have gigabytes of none."""
PLAIN: Final = {
    0: "float32", 1: "float16", 30: "bfloat16", 28: "float64", 24: "int8", 25: "int16", 26: "int32", 27: "int64",
}  # fmt: skip
"""ggml's types that torch has as well: number and torch's name."""
PACKED: Final = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k", 14: "q6_k",
    20: "iq4_nl", 23: "iq4_xs", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4",
}  # fmt: skip
"""ggml's types of packed blocks: number and name in ``QUANT_BLOCKS``."""
_UNREAD: Final = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S",
    29: "IQ1_M", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""What is refused by name: blocks whose numbers stand in tables of ggml's, and those of sums under way."""
_ITEMS: Final = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int8": 1, "int16": 2, "int32": 4, "int64": 8}
_SCALARS: Final = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING: Final = 8
_ARRAY: Final = 9
_BUFFER: Final = 1 * MIB


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor as the file has it. ``kind`` is a dtype of torch or a name in ``QUANT_BLOCKS``; ``shape`` is outermost
    first (the file counts the other way round); ``offset`` in bytes of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    @property
    def packed(self) -> bool:
        """Whether its bytes are quantised blocks."""
        return self.kind in QUANT_BLOCKS

    @property
    def block(self) -> tuple[int, int]:
        """Elements and bytes of its smallest part."""
        return QUANT_BLOCKS[self.kind] if self.packed else (1, _ITEMS[self.kind])


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says before its data."""

    path: Path
    metadata: dict[str, Value]
    tensors: tuple[GgufTensor, ...]


class _Cursor:
    """Reads forward through a file; never behind its end."""

    def __init__(self, fd: int, path: Path) -> None:
        self._fd, self.path = fd, path
        self.size = os.fstat(fd).st_size
        self._buffer, self._start, self.at = b"", 0, 0

    @property
    def left(self) -> int:
        """Bytes up to the end of the file."""
        return self.size - self.at

    def bytes(self, count: int) -> bytes:
        """The next ``count`` bytes. Raises ``InvalidCheckpoint`` if the file has not that many."""
        if count > self.left:
            raise self.bad(f"it says {count} bytes follow byte {self.at}, but it ends at {self.size}")
        if self.at + count > MAX_HEADER:
            raise self.bad(f"its header is longer than {MAX_HEADER} bytes")
        begin = self.at - self._start
        if begin + count > len(self._buffer):
            data = bytearray(min(max(count, _BUFFER), self.left))
            read_exactly(self._fd, memoryview(data), self.at, self.path)
            self._buffer, self._start, begin = bytes(data), self.at, 0
        self.at += count
        return self._buffer[begin : begin + count]

    def number(self, form: str) -> int | float | bool:
        """The next scalar."""
        value: int | float | bool = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        return value

    def integer(self, form: str) -> int:
        """The next whole number."""
        return int(self.number(form))

    def text(self) -> str:
        """The next string."""
        return self.bytes(self.integer("<Q")).decode("utf-8", errors="replace")

    def bad(self, what: str) -> InvalidCheckpoint:
        """The error for this file."""
        return InvalidCheckpoint(f"{self.path}: {what}; fetch it again", field=self.path.name)


def read_header(fd: int, path: Path) -> GgufHeader:
    """The checked header of the GGUF file ``fd``. Raises ``InvalidCheckpoint`` or ``UnsupportedModel``."""
    cursor = _Cursor(fd, path)
    if cursor.bytes(4) != b"GGUF":
        raise cursor.bad("it does not begin with GGUF")
    version = cursor.integer("<I")
    if version not in (2, 3):
        kind = "big-endian" if version.to_bytes(4, "big")[0] in (2, 3) else f"version {version}"
        raise UnsupportedModel(f"{path} is {kind}; little-endian files of versions 2 and 3 are read", field=path.name)
    tensors, pairs = cursor.integer("<Q"), cursor.integer("<Q")
    if tensors > MAX_TENSORS or pairs > MAX_PAIRS:
        raise cursor.bad(f"{tensors} tensors or {pairs} pairs of metadata are above the limits")
    metadata: dict[str, Value] = {}
    for _ in range(pairs):
        key = cursor.text()
        if key in metadata:
            raise cursor.bad(f"metadata {key[:80]!r} stands there twice")
        metadata[key] = _value(cursor, cursor.integer("<I"), 0)
    infos = [_info(cursor) for _ in range(tensors)]
    return GgufHeader(path, metadata, _placed(cursor, infos, _alignment(cursor, metadata)))


def _value(cursor: _Cursor, kind: int, depth: int) -> Value:
    if kind in _SCALARS:
        return cursor.number(_SCALARS[kind])
    if kind == _STRING:
        return cursor.text()
    if kind != _ARRAY or depth == MAX_ARRAY_DEPTH:
        raise cursor.bad(f"metadata of type {kind} at depth {depth} is unknown")
    inner, count = cursor.integer("<I"), cursor.integer("<Q")
    if inner in _SCALARS:
        form = _SCALARS[inner]
        if count * struct.calcsize(form) > cursor.left:
            raise cursor.bad(f"an array of {count} does not fit behind byte {cursor.at}")
        return list(struct.unpack(f"<{count}{form[1]}", cursor.bytes(count * struct.calcsize(form))))
    if count * 8 > cursor.left:  # a string has its length, an array its type and length
        raise cursor.bad(f"an array of {count} does not fit behind byte {cursor.at}")
    return [_value(cursor, inner, depth + 1) for _ in range(count)]


def _info(cursor: _Cursor) -> tuple[str, str, tuple[int, ...], int]:
    name, count = cursor.text(), cursor.integer("<I")
    if not 1 <= count <= MAX_DIMENSIONS:
        raise cursor.bad(f"tensor {name[:80]!r} has {count} dimensions")
    shape = tuple(reversed([cursor.integer("<Q") for _ in range(count)]))
    kind, offset = cursor.integer("<I"), cursor.integer("<Q")
    if kind not in PLAIN and kind not in PACKED:
        text = (
            f"{cursor.path}: tensor {name[:80]!r} has ggml type {_UNREAD.get(kind, kind)}, which is not read; take the"
        )
        raise UnsupportedModel(f"{text} model in another quantisation, as Q4_K_M or IQ4_XS", field=name)
    return name, PLAIN.get(kind) or PACKED[kind], shape, offset


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 8 <= alignment <= MIB or alignment & (alignment - 1):
        raise cursor.bad(f"alignment {alignment!r} is no power of two from 8 to 1 MiB")
    return alignment


def _placed(
    cursor: _Cursor, infos: Sequence[tuple[str, str, tuple[int, ...], int]], alignment: int
) -> tuple[GgufTensor, ...]:
    """Tensors lie one behind the other, padded to the alignment, up to the end of the file."""
    start = align(cursor.at, alignment)
    if len({name for name, *_ in infos}) != len(infos):
        raise cursor.bad("a tensor's name stands there twice")
    expected, found = 0, []
    for name, kind, shape, offset in sorted(infos, key=lambda info: info[3]):
        tensor = GgufTensor(name, kind, shape, start + offset, 0)
        elements, block = tensor.block
        if prod(shape) > MAX_BYTES or prod(shape) == 0 or shape[-1] % elements:
            raise cursor.bad(f"tensor {name[:80]!r} of {kind} has shape {shape}")
        if offset != expected:
            raise cursor.bad(f"tensor {name[:80]!r} is at byte {offset} of the data, not at {expected}")
        nbytes = prod(shape) // elements * block
        if start + offset + nbytes > cursor.size:
            raise cursor.bad(f"it ends before tensor {name[:80]!r} does")
        found.append(GgufTensor(name, kind, shape, start + offset, nbytes))
        expected = align(offset + nbytes, alignment)
    if infos and cursor.size > start + expected:
        raise cursor.bad(f"{cursor.size - start - expected} bytes stand behind its last tensor")
    return tuple(found)
