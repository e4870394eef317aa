"""The index file of a sharded model: which tensor is in which file."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path

import msgspec

from sllm_loaderd.files import ONE_FILE, SHARD_INDEX, plain_name
from sllm_runtime.protocol.errors import InvalidCheckpoint


class _ShardIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_shard_index(path: Path) -> tuple[dict[str, str], list[Path]]:
    """File by tensor, and the files. Raises ``InvalidCheckpoint``, also for a file outside the directory."""
    wanted, files = decode_shard_index(path.read_bytes(), path.name)
    return wanted, [path.parent / name for name in files]


def decode_shard_index(data: bytes, name: str) -> tuple[dict[str, str], list[str]]:
    """File by tensor, and the names of the files; ``name`` is the index's own. Raises ``InvalidCheckpoint``."""
    try:
        wanted = msgspec.json.decode(data, type=_ShardIndex).weight_map
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidCheckpoint(f"{name} is not a shard index: {error}", field=name) from error
    files = sorted({plain_name(file, f"{name}: shard") for file in wanted.values()})
    if not files:
        raise InvalidCheckpoint(f"{name} names no shard", field=name)
    return wanted, files


def weights_of(
    names: Container[str], read: Callable[[str], bytes]
) -> tuple[Mapping[str, str] | None, list[str]] | None:
    """Which safetensors are read of the files that a model has, as ``formats.source_files`` chooses: its one file, else
    those that its index names, with the file of each tensor. None: neither is there. ``read`` gives the index.
    Raises ``InvalidCheckpoint``."""
    if ONE_FILE in names:
        return None, [ONE_FILE]
    return decode_shard_index(read(SHARD_INDEX), SHARD_INDEX) if SHARD_INDEX in names else None


def check_shards(wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    """Compare the index (``wanted``: file by tensor) with what the files have. Raises ``InvalidCheckpoint``."""
    for name, file in wanted.items():
        if found.get(name) != file:
            raise InvalidCheckpoint(f"the shard index says {name!r} is in {file}, but it is not", field=name)
    extra = next((name for name in found if name not in wanted), None)
    if extra is not None:
        raise InvalidCheckpoint(f"tensor {extra!r} is in a shard but not in the shard index", field=extra)
