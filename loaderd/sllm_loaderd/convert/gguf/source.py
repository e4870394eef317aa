"""The tensors of a GGUF model, in one file or split over several."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from sllm_loaderd.convert.gguf.architectures import Target, architecture_of, targets
from sllm_loaderd.convert.gguf.config import derive_config, heads
from sllm_loaderd.convert.gguf.header import GgufHeader, GgufTensor, read_header
from sllm_loaderd.convert.gguf.tokenizer import derive_tokenizer
from sllm_loaderd.convert.gguf.values import Values
from sllm_loaderd.convert.source import SourceExtras, SourceTensor
from sllm_loaderd.files import gguf_parts, open_source_file
from sllm_runtime.protocol.errors import InvalidCheckpoint

_CONFIG: Final = "config.json"
_MAX_FACTORS: Final = 4096
"""Numbers in a tensor of rotary factors: half a head's width."""


class GgufSource:
    """``files`` are those of one model. ``keep``: quantised blocks stay packed. ``given``: names of files that lie
    beside them: a configuration among these is not derived, which may not be possible.

    Raises ``InvalidCheckpoint`` for a file that is not what its header says, ``UnsupportedModel`` for what is not read.
    """

    def __init__(self, files: Sequence[Path], *, keep: bool = False, given: Collection[str] = ()) -> None:
        self._fds: list[int] = []
        self._values: dict[str, Values] = {}
        self._tensors: dict[str, SourceTensor] = {}
        try:
            self._headers = [self._open(path) for path in _one_model(files)]
            _check_split(self._headers)
            self._prefix, self._kind = architecture_of(self._headers[0])
            self._map(keep)
            self._files = self._derived(given)
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
        quants = tuple(quant for value in self._values.values() if (quant := value.quant) is not None)
        return SourceExtras(self._files, quants)

    def read(self, name: str, start: int, view: memoryview) -> None:
        self._values[name].read(start, view)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _open(self, path: Path) -> GgufHeader:
        fd = open_source_file(path)
        self._fds.append(fd)
        return read_header(fd, path)

    def _map(self, keep: bool) -> None:
        query, key = heads(self._headers[0], self._prefix)
        for number, header in enumerate(self._headers):
            for tensor in header.tensors:
                for place, target in enumerate(targets(tensor, self._kind, query, key)):
                    self._add(target, number, (number, tensor.offset + place), keep)

    def _add(self, target: Target, file: int, position: tuple[int, int], keep: bool) -> None:
        if target.name in self._tensors:
            path = self._headers[file].path
            raise InvalidCheckpoint(f"{path}: tensor {target.name!r} is there twice", field=target.name)
        value = Values(target, self._fds[file], keep=keep)
        self._values[target.name] = value
        granule = target.source.block[1] if value.kept else 1
        self._tensors[target.name] = SourceTensor(
            target.name, value.dtype, value.shape, value.nbytes, position, granule
        )

    def _derived(self, given: Collection[str]) -> dict[str, bytes]:
        embedding = next((t for header in self._headers for t in header.tensors if t.name == "token_embd.weight"), None)
        if embedding is None:
            path = self._headers[0].path
            raise InvalidCheckpoint(f"{path} has no token_embd.weight; it is no language model", field=path.name)
        tokenizer = derive_tokenizer(self._prefix, self._headers[0].metadata)
        if _CONFIG in given:
            return tokenizer
        sizes: Counter[str] = Counter()
        for value in self._values.values():
            sizes["bfloat16" if value.kept else value.dtype] += value.nbytes
        whole = GgufHeader(
            self._headers[0].path,
            self._headers[0].metadata,
            tuple(tensor for header in self._headers for tensor in header.tensors),
        )
        config = derive_config(
            whole, self._prefix, self._kind, embedding.shape[0], sizes.most_common(1)[0][0], self._factors
        )
        return {_CONFIG: json.dumps(config, indent=1).encode() + b"\n", **tokenizer}

    def _factors(self, name: str) -> list[float] | None:
        for number, header in enumerate(self._headers):
            tensor = next((tensor for tensor in header.tensors if tensor.name == name), None)
            if tensor is not None:
                return self._floats(tensor, number)
        return None

    def _floats(self, tensor: GgufTensor, file: int) -> list[float]:
        if tensor.kind != "float32" or tensor.nbytes > 4 * _MAX_FACTORS:
            text = f"tensor {tensor.name!r} of {tensor.kind} {tensor.shape} holds no rotary factors"
            raise InvalidCheckpoint(text, field=tensor.name)
        data = np.empty(tensor.nbytes, dtype=np.uint8)
        Values(Target(tensor.name, tensor), self._fds[file], keep=False).read(0, data.data)
        return [float(f"{number:.7g}") for number in data.view("<f4")]


def _one_model(files: Sequence[Path]) -> list[Path]:
    """All files of the model that ``files`` belong to. Raises ``InvalidCheckpoint`` if they are several models."""
    wanted = gguf_parts(files[0])
    others = set(files) - set(wanted)
    if others:
        text = f"{files[0].parent} has several models ({files[0].name}, {min(others).name}); give one file"
        raise InvalidCheckpoint(text, field="source")
    missing = next((path for path in wanted if not path.is_file()), None)
    if missing is not None:
        raise InvalidCheckpoint(f"{missing} is missing, one of {len(wanted)} parts of the model", field=missing.name)
    return wanted


def _check_split(headers: Sequence[GgufHeader]) -> None:
    for number, header in enumerate(headers):
        count, place = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
        if count not in (len(headers), 0) or (len(headers) > 1 and place != number):
            text = f"{header.path} says it is part {place} of {count}; give the model's parts under their own names"
            raise InvalidCheckpoint(text, field=header.path.name)
