"""Takes the index and the small files of a checkpoint that a remote source has converted; its bytes stay there."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from pathlib import Path

from sllm_loaderd.files import MAX_SMALL_FILE, sync_directory, write_durable
from sllm_loaderd.sources import Entry, Source
from sllm_runtime.protocol.checkpoint import (
    INDEX_NAME,
    MAX_INDEX,
    CheckpointIndex,
    decode_index,
    index_digest,
    partition_name,
)
from sllm_runtime.protocol.errors import CorruptCheckpoint, DigestMismatch


def take_index(source: Source, entries: Sequence[Entry], staging: Path, expected: str = "") -> str:
    """Write index and small files, checked and durable, into the new directory ``staging``. The model's digest.

    Raises ``CorruptCheckpoint`` for what does not fit the index, ``DigestMismatch`` if it is not ``expected``.
    """
    by_name = {entry.name: entry for entry in entries}
    encoded = _read(source, by_name, INDEX_NAME, MAX_INDEX)
    digest = index_digest(encoded)
    if expected and digest != expected:
        raise DigestMismatch(f"{source.uri} is {digest}, not {expected}", field="model")
    index = decode_index(encoded)
    _check_partitions(source, by_name, index)
    staging.mkdir()
    for record in index.files:
        data = _read(source, by_name, record.name, MAX_SMALL_FILE)
        if len(data) != record.nbytes or hashlib.sha256(data).hexdigest() != record.sha256:
            raise CorruptCheckpoint(
                f"{source.uri}: {record.name} is not the file its index names; upload the checkpoint again",
                field=record.name,
            )
        write_durable(staging / record.name, data)
    write_durable(staging / INDEX_NAME, encoded)
    sync_directory(staging)
    return digest


def _check_partitions(source: Source, entries: dict[str, Entry], index: CheckpointIndex) -> None:
    for partition in index.partitions:
        name = partition_name(partition.rank)
        there = entries[name].nbytes if name in entries else None
        if there != partition.nbytes:
            text = "is not there" if there is None else f"has {there} bytes"
            raise CorruptCheckpoint(
                f"{source.uri}: {name} {text} where its index says {partition.nbytes}; upload the checkpoint again",
                field=name,
            )


def _read(source: Source, entries: dict[str, Entry], name: str, most: int) -> bytes:
    entry = entries.get(name)
    if entry is None or entry.nbytes > most:
        text = "is not there" if entry is None else f"has {entry.nbytes} bytes, above the limit of {most}"
        raise CorruptCheckpoint(f"{source.uri}: {name} {text}; upload the checkpoint again", field=name)
    data = bytearray(entry.nbytes)
    with contextlib.closing(source.open(entry)) as opened:
        opened.read(memoryview(data), 0)
    return bytes(data)
