"""Source format: PyTorch ``.bin`` files, single or sharded, read with ``weights_only=True`` and mapped, not copied."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from sllm_loaderd.convert.source import SourceTensor
from sllm_loaderd.files import plain_name
from sllm_runtime.protocol.checkpoint import ITEM_BYTES
from sllm_runtime.protocol.errors import InvalidCheckpoint, UnsupportedModel


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class TorchSource:
    """The tensors of ``.bin`` files. A tensor that shares all its bytes with another one is a tie. Raises
    ``InvalidCheckpoint`` for a file that holds anything but tensors, or a name in two shards."""

    def __init__(self, files: list[Path]) -> None:
        self._data: dict[str, torch.Tensor] = {}
        self._tensors: dict[str, SourceTensor] = {}
        self._ties: dict[str, str] = {}
        self._current = ("", torch.empty(0))
        if files[0].name.endswith(".index.json"):
            files = _shards(files[0])
        for shard, path in enumerate(files):
            self._open(shard, path)

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        return self._tensors

    @property
    def ties(self) -> Mapping[str, str]:
        return self._ties

    def read(self, name: str, start: int, view: memoryview) -> None:
        if self._current[0] != name:  # read in pieces, one tensor after the other: made contiguous once
            self._current = (name, self._data[name].contiguous())
        raw = self._current[1].reshape(-1).view(torch.uint8).numpy()
        view[:] = raw.data[start : start + len(view)]

    def close(self) -> None:
        self._data.clear()
        self._current = ("", torch.empty(0))

    def _open(self, shard: int, path: Path) -> None:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise InvalidCheckpoint(f"{path} is not a file of tensors alone: {error}", field=path.name) from error
        if not isinstance(state, dict):
            raise InvalidCheckpoint(f"{path} holds a {type(state).__name__}, not a state dict", field=path.name)
        seen: dict[tuple[object, ...], str] = {}
        for number, (name, tensor) in enumerate(state.items()):
            self._add(name, tensor, (shard, number), path, seen)

    def _add(
        self, name: object, tensor: object, position: tuple[int, int], path: Path, seen: dict[tuple[object, ...], str]
    ) -> None:
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise InvalidCheckpoint(f"{path}: entry {name!r} is a {type(tensor).__name__}, no tensor", field=str(name))
        if name in self._tensors or name in self._ties:
            raise InvalidCheckpoint(f"tensor {name!r} stands in two shards, the second is {path.name}", field=name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES or tensor.layout is not torch.strided:
            raise UnsupportedModel(f"{path}: tensor {name!r} is {tensor.dtype} {tensor.layout}", field=name)
        identity = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and identity in seen:
            self._ties[name] = seen[identity]
            return
        seen[identity] = name
        plain = tensor.detach().resolve_conj().resolve_neg()
        self._data[name] = plain
        self._tensors[name] = SourceTensor(name, dtype, tuple(plain.shape), plain.numel() * ITEM_BYTES[dtype], position)


def _shards(path: Path) -> list[Path]:
    try:
        wanted = msgspec.json.decode(path.read_bytes(), type=_ShardIndex).weight_map
    except msgspec.MsgspecError as error:
        raise InvalidCheckpoint(f"{path} is not a shard index: {error}", field=path.name) from error
    return [path.parent / plain_name(name, f"{path.name}: shard") for name in sorted(set(wanted.values()))]
