"""Source format: PyTorch ``.bin`` files, single or sharded. Only their pickle is loaded (``weights_only``), on the meta
device; bytes are read from where it says they are, so that no tensor is ever in memory as a whole."""

from __future__ import annotations

import mmap
import os
import pickle
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from sllm_loaderd.convert.shards import check_shards, read_shard_index
from sllm_loaderd.convert.source import SourceExtras, SourceTensor
from sllm_loaderd.convert.strided import Strided, read_strided
from sllm_loaderd.files import open_source_file, read_exactly
from sllm_runtime.protocol.checkpoint import ITEM_BYTES, contiguous_stride, extent
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel

_LOCAL_HEADER: Final = 30
"""Bytes of a zip's local header before its name."""
_LOAD_ERRORS: Final = (OSError, RuntimeError, ValueError, EOFError, KeyError, AttributeError, TypeError, AssertionError,
                       IndexError, pickle.UnpicklingError, zipfile.BadZipFile)  # fmt: skip
"""What torch.load raises on files that are not what they should be."""
_GLOBAL: Final = re.compile(r"GLOBAL ([\w.]+)")


class _File:
    """One ``.bin``: where its storages lie. The old format, which has no zip around it, is held in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = open_source_file(path)
        self._map: mmap.mmap | None = None
        self._storages: dict[int, memoryview] = {}
        try:
            self.zipped = zipfile.is_zipfile(path)
            self._records = _records(path) if self.zipped else {}
        except BaseException:
            self.close()
            raise

    def load(self) -> Any:
        """What is pickled in it; raises any of ``_LOAD_ERRORS``."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch only wonders about is judged here, by name
            return torch.load(self.path, map_location="meta" if self.zipped else "cpu", weights_only=True)

    def place(self, tensor: torch.Tensor, item: int) -> Strided:
        """Where the bytes of ``tensor`` are. Raises ``InvalidCheckpoint`` if that is outside its storage."""
        storage = tensor.untyped_storage()
        start, size = 0, storage.nbytes()
        if self.zipped and size:
            start = int(getattr(storage, "_checkpoint_offset", None) or 0)  # see the notes of torch.load
            size = min(size, self._records.get(start, 0))
        elif size:
            start = storage.data_ptr()
            self._storages.setdefault(start, _bytes_of(storage))
        reach = tensor.storage_offset() + extent(tuple(tensor.shape), tensor.stride())
        if tensor.numel() and reach * item > size:
            text = f"{self.path}: a tensor reaches byte {reach * item} of a storage of {size}"
            raise InvalidCheckpoint(text, field=self.path.name)
        return Strided(
            offset=start + int(tensor.storage_offset()) * item,
            item=item,
            shape=tuple(tensor.shape),
            stride=tuple(tensor.stride()),
            halves=2 if tensor.is_complex() else 1,
            conjugate=tensor.is_conj(),
            negative=tensor.is_neg(),
        )

    def read(self, tensor: Strided, start: int, view: memoryview) -> None:
        """Row-major bytes of ``tensor`` from ``start`` on."""
        if not self.zipped:
            base = max(address for address in self._storages if address <= tensor.offset)
            local = _moved(tensor, tensor.offset - base)
            read_strided(self._storages[base], local, start, view)
            return
        plain = tensor.stride == contiguous_stride(tensor.shape) and not (tensor.conjugate or tensor.negative)
        if plain:
            read_exactly(self._fd, view, tensor.offset + start, self.path)
            return
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_READ)
        read_strided(self._map, tensor, start, view)

    def close(self) -> None:
        self._storages.clear()
        if self._map is not None:
            self._map.close()
            self._map = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class TorchSource:
    """The tensors of ``.bin`` files. A tensor that is the same view of the same storage as another one is a tie. Raises
    ``InvalidCheckpoint`` for a file that holds anything but tensors, or a name in two shards."""

    def __init__(self, files: list[Path]) -> None:
        self._files: list[_File] = []
        self._places: dict[str, tuple[int, Strided]] = {}
        self._tensors: dict[str, SourceTensor] = {}
        self._ties: dict[str, str] = {}
        wanted: dict[str, str] | None = None
        if files[0].name.endswith(".index.json"):
            wanted, files = read_shard_index(files[0])
        try:
            for path in files:
                self._open(path)
            if wanted is not None:
                found = {name: self._files[place[0]].path.name for name, place in self._places.items()}
                check_shards(wanted, found | {name: found[of] for name, of in self._ties.items()})
        except BaseException:
            self.close()
            raise

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @property
    def ties(self) -> Mapping[str, str]:
        return self._ties

    @property
    def extras(self) -> SourceExtras:
        return SourceExtras()

    def read(self, name: str, start: int, view: memoryview) -> None:
        shard, tensor = self._places[name]
        self._files[shard].read(tensor, start, view)

    def close(self) -> None:
        while self._files:
            self._files.pop().close()

    def _open(self, path: Path) -> None:
        try:
            file = _File(path)
            self._files.append(file)
            state = file.load()
        except _LOAD_ERRORS as error:
            raise InvalidCheckpoint(f"{path} is not a file of tensors alone: {_why(error)}", field=path.name) from error
        if not isinstance(state, dict):
            raise InvalidCheckpoint(f"{path} holds a {type(state).__name__}, not a state dict", field=path.name)
        seen: dict[Strided, str] = {}
        for name, tensor in state.items():
            self._add(name, tensor, file, seen)

    def _add(self, name: object, tensor: object, file: _File, seen: dict[Strided, str]) -> None:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            kind = type(tensor).__name__
            raise InvalidCheckpoint(f"{file.path}: entry {name!r} is a {kind}, no tensor", field=str(name))
        if name in self._tensors or name in self._ties:
            text = f"tensor {name!r} stands in two shards, the second is {file.path.name}"
            raise InvalidCheckpoint(text, field=name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or tensor.layout is not torch.strided:
            raise UnsupportedModel(f"{file.path}: tensor {name!r} is {tensor.dtype} {tensor.layout}", field=name)
        place = file.place(tensor, ITEM_BYTES[dtype])
        twin = seen.setdefault(place, name) if tensor.numel() else name
        if twin != name and self._tensors[twin].dtype == dtype:
            self._ties[name] = twin
            return
        position = (len(self._files) - 1, len(self._tensors))
        self._places[name] = (position[0], place)
        self._tensors[name] = SourceTensor(name, dtype, place.shape, place.nbytes, position)


def _why(error: Exception) -> str:
    """Torch's own words for a pickle of more than tensors say how to run the code in it, which nobody can here."""
    if not isinstance(error, pickle.UnpicklingError):
        return str(error)
    found = _GLOBAL.search(str(error))
    held = f"it holds a {found[1]}" if found else "its pickle cannot be read"
    return f"{held}, and no code of a pickle is run; save the model's state_dict(), or by save_pretrained()"


def _records(path: Path) -> dict[int, int]:
    """Sizes of the storages by their offset in the file. Raises ``InvalidCheckpoint`` for what cannot be read there."""
    found = {}
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for info in archive.infolist():
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise InvalidCheckpoint(f"{path}: {info.filename!r} is compressed", field=path.name)
            if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                raise UnsupportedModel(f"{path} has big-endian tensors; save it again here", field=path.name)
            file.seek(info.header_offset + 26)
            lengths = file.read(4)
            name, extra = int.from_bytes(lengths[:2], "little"), int.from_bytes(lengths[2:], "little")
            offset = info.header_offset + _LOCAL_HEADER + name + extra
            if offset + info.file_size > os.fstat(file.fileno()).st_size:
                raise InvalidCheckpoint(f"{path} ends before {info.filename!r} does", field=path.name)
            found[offset] = info.file_size
    return found


def _bytes_of(storage: torch.UntypedStorage) -> memoryview:
    flat = torch.empty(0, dtype=torch.uint8).set_(storage)
    return flat.numpy().data


def _moved(tensor: Strided, offset: int) -> Strided:
    return Strided(offset, tensor.item, tensor.shape, tensor.stride, tensor.halves, tensor.conjugate, tensor.negative)
