"""`--verify`: every tensor read back from the partitions, by the index alone, and compared with its source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from sllm_loaderd.assemble import WholeTensors
from sllm_loaderd.convert.partitions import Progress
from sllm_loaderd.convert.pieces import PartsReader, Read
from sllm_loaderd.convert.plan import StoragePlan
from sllm_loaderd.convert.source import TensorSource
from sllm_runtime.protocol.checkpoint import CheckpointIndex
from sllm_runtime.protocol.errors import CorruptCheckpoint


def compare_with_source(
    directory: Path, index: CheckpointIndex, source: TensorSource, plan: StoragePlan, progress: Progress
) -> None:
    """Compare bit for bit. Raises ``CorruptCheckpoint`` naming tensor and byte."""
    aliases = {alias.name: alias.of for alias in index.aliases}
    total = sum(tensor.nbytes for tensor in index.tensors)
    done = 0
    with contextlib.closing(WholeTensors(directory, index)) as whole:
        for name, stored in plan.stored.items():
            read = PartsReader(source, stored.parts)
            for windows in whole.copies(name):
                done = _compare(name, read, stored.tensor.nbytes, windows, done, total, progress)
        for name, of in plan.ties.items():
            if name in source.tensors and aliases.get(name) == of:
                for windows in whole.copies(of):
                    _compare(
                        name, PartsReader(source, (name,)), source.tensors[name].nbytes, windows, done, total, None
                    )


def _compare(
    name: str, read: Read, nbytes: int, windows: Iterator[memoryview], done: int, total: int, progress: Progress | None
) -> int:
    start = 0
    for window in windows:
        wanted = bytearray(len(window))
        read(start, memoryview(wanted))
        if wanted != window:
            at = next(number for number, (a, b) in enumerate(zip(wanted, window, strict=True)) if a != b)
            raise _differs(name, start + at)
        start += len(window)
        if progress is not None:
            progress(done + start, total)
    if start != nbytes:
        raise _differs(name, start)
    return done + start


def _differs(name: str, at: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        f"tensor {name!r} differs from its source at byte {at}: memory or disk is at fault; convert again", field=name
    )
