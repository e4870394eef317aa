"""What all remote sources say of their files."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable

from sllm_loaderd.files import is_small_file
from sllm_loaderd.sources import Entry
from sllm_runtime.protocol.checkpoint import INDEX_NAME

_PARTITION = re.compile(r"partition_\d{1,6}\.bin")


def fingerprint(entries: Iterable[Entry]) -> str:
    """Of names, sizes and entity tags."""
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(f"{entry.name}\0{entry.nbytes}\0{entry.etag}\n".encode())
    return f"objects:{digest.hexdigest()}"


def wanted(name: str) -> bool:
    """Whether a file of this name is taken along: weights, their index, small files; never code."""
    weights = name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".gguf"))
    return weights or is_small_file(name) or name == INDEX_NAME or is_partition(name)


def is_partition(name: str) -> bool:
    """Whether this is a partition of a converted checkpoint."""
    return _PARTITION.fullmatch(name) is not None
