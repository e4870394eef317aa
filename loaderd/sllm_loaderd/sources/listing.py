"""What all remote sources say of their files."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from typing import Protocol

from sllm_loaderd.files import is_small_file
from sllm_loaderd.reader import ByteSource
from sllm_loaderd.sources import Entry
from sllm_runtime.protocol.checkpoint import INDEX_NAME
from sllm_runtime.protocol.errors import InvalidCheckpoint

_PARTITION = re.compile(r"partition_\d{1,6}\.bin")


class Opens(Protocol):
    """Of a source, how its files are read."""

    def open(self, entry: Entry) -> ByteSource: ...


def fingerprint(entries: Iterable[Entry]) -> str:
    """Of names, sizes and entity tags."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.nbytes}\0{entry.etag}\n".encode())
    return f"objects:{digest.hexdigest()}"


def read_whole(source: Opens, entry: Entry, most: int) -> bytes:
    """All of one of its files. Raises ``InvalidCheckpoint`` for one of more than ``most`` bytes."""
    if entry.nbytes > most:
        raise InvalidCheckpoint(f"{entry.name} has {entry.nbytes} bytes, above the limit of {most}", field=entry.name)
    data = bytearray(entry.nbytes)
    with contextlib.closing(source.open(entry)) as opened:
        opened.read(memoryview(data), 0)
    return bytes(data)


def wanted(name: str) -> bool:
    """Whether a file of this name is taken along: weights, their index, small files; never code."""
    weights = name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf"))
    return weights or is_small_file(name) or name == INDEX_NAME or is_partition(name)


def is_partition(name: str) -> bool:
    """Whether this is a partition of a converted checkpoint."""
    return _PARTITION.fullmatch(name) is not None
