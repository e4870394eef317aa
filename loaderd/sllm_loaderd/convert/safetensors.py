"""Source format: safetensors, single or sharded. The header is read here, so that no byte goes unexplained."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Final

import msgspec

from sllm_loaderd.convert.shards import check_shards, read_shard_index
from sllm_loaderd.convert.source import SourceExtras, SourceTensor
from sllm_loaderd.files import open_source_file, read_exactly
from sllm_runtime.protocol.checkpoint import ITEM_BYTES, MAX_DIMS
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

MAX_HEADER: Final = 100_000_000
"""Bytes; the same limit as the safetensors library has."""
DTYPES: Final = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz", "C64": "complex64",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
_PAIRS: Final = "F4"
"""Two elements a byte: the header counts elements, torch bytes."""


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SafetensorsSource:
    """The tensors of a safetensors directory. Raises ``InvalidCheckpoint`` for holes, overlaps, trailing bytes,
    a name in two shards, a shard outside the directory, or an index that does not fit."""

    def __init__(self, files: list[Path]) -> None:
        self._fds: list[tuple[int, Path]] = []
        self._tensors: dict[str, SourceTensor] = {}
        self._places: dict[str, tuple[int, int]] = {}
        wanted: dict[str, str] | None = None
        if files[0].name.endswith(".index.json"):
            wanted, files = read_shard_index(files[0])
        try:
            for path in files:
                self._open(path)
            if wanted is not None:
                check_shards(wanted, {name: self._fds[place[0]][1].name for name, place in self._places.items()})
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @property
    def ties(self) -> Mapping[str, str]:
        return {}

    @property
    def extras(self) -> SourceExtras:
        return SourceExtras()

    def read(self, name: str, start: int, view: memoryview) -> None:
        shard, offset = self._places[name]
        fd, path = self._fds[shard]
        read_exactly(fd, view, offset + start, path)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop()[0])

    def _open(self, path: Path) -> None:
        fd = open_source_file(path)
        shard = len(self._fds)
        self._fds.append((fd, path))
        entries, data_start = _read_header(fd, path)
        for tensor in torch_tensors(entries, shard):
            name = tensor.name
            if name in self._tensors:
                other = self._fds[self._places[name][0]][1]
                raise InvalidCheckpoint(
                    f"tensor {name!r} stands in two shards, {other.name} and {path.name}", field=name
                )
            self._tensors[name] = tensor
            self._places[name] = (shard, data_start + tensor.position[1])


def _read_header(fd: int, path: Path) -> tuple[dict[str, _Entry], int]:
    size = os.fstat(fd).st_size
    head = bytearray(8)
    read_exactly(fd, memoryview(head), 0, path)
    length = int.from_bytes(head, "little")
    if length > min(MAX_HEADER, size - 8):
        raise InvalidCheckpoint(f"{path}: header of {length} bytes in a file of {size}", field=path.name)
    raw = bytearray(length)
    read_exactly(fd, memoryview(raw), 8, path)
    return parse_header(raw, size - 8 - length, path), 8 + length


def parse_header(raw: bytearray, data_bytes: int, path: Path) -> dict[str, _Entry]:
    """What a header says that ``data_bytes`` of tensors follow. Raises ``InvalidCheckpoint``, ``UnsupportedModel``."""
    try:
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        fields.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(value, type=_Entry) for name, value in fields.items()}
        repeated = len(fields) != _count_keys(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{path}: the header is not valid: {error}", field=path.name) from error
    if repeated:
        raise InvalidCheckpoint(f"{path}: a tensor's name stands in the header twice", field=path.name)
    _check_cover(entries, data_bytes, path)
    return entries


def torch_tensors(header: Mapping[str, _Entry], shard: int) -> Iterator[SourceTensor]:
    """The tensors of a header as torch has them; ``position`` is (shard, offset in its data)."""
    for name, entry in header.items():
        begin, end = entry.data_offsets
        yield SourceTensor(name, DTYPES[entry.dtype], _torch_shape(entry), end - begin, (shard, begin))


def _count_keys(raw: bytearray) -> int:
    """Keys of the header's object, repeated ones counted each time, ``__metadata__`` left out."""
    import json  # the only parser at hand that shows repeated keys

    pairs: list[tuple[str, object]] = json.loads(raw, object_pairs_hook=list)
    return sum(1 for key, _ in pairs if key != "__metadata__")


def _torch_shape(entry: _Entry) -> tuple[int, ...]:
    return (*entry.shape[:-1], entry.shape[-1] // 2) if entry.dtype == _PAIRS else entry.shape


def _check_cover(entries: dict[str, _Entry], size: int, path: Path) -> None:
    """The tensors cover the data from its first to its last byte, each with the bytes its shape says."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        begin, stop = entry.data_offsets
        if entry.dtype not in DTYPES:
            raise UnsupportedModel(f"{path}: tensor {name!r} has dtype {entry.dtype}, which is not served", field=name)
        if begin != end:
            kind = "a hole" if begin > end else "an overlap"
            raise InvalidCheckpoint(f"{path}: {kind} before tensor {name!r} (byte {end}, {begin})", field=name)
        if len(entry.shape) > MAX_DIMS or any(dim < 0 for dim in entry.shape):
            raise InvalidCheckpoint(f"{path}: tensor {name!r} has shape {entry.shape}", field=name)
        if entry.dtype == _PAIRS and (not entry.shape or entry.shape[-1] % 2):
            raise InvalidCheckpoint(f"{path}: tensor {name!r} of F4 {entry.shape} is no whole bytes", field=name)
        if stop - begin != prod(_torch_shape(entry)) * ITEM_BYTES[DTYPES[entry.dtype]]:
            raise InvalidCheckpoint(
                f"{path}: tensor {name!r} has {stop - begin} bytes, not what {entry.dtype} {entry.shape} needs",
                field=name,
            )
        end = stop
    if end != size:
        kind = f"has {size - end} bytes behind its last tensor" if size > end else f"is {end - size} bytes too short"
        raise InvalidCheckpoint(f"{path} {kind}; fetch it again", field=path.name)
