"""Converts one model: reads the source once, writes the checkpoint, and makes it visible by a rename."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sllm_loaderd.convert.auto_ranks import auto_shares
from sllm_loaderd.convert.execution import execution_plan
from sllm_loaderd.convert.formats import open_source
from sllm_loaderd.convert.partitions import Progress, Written, full_order, lay_out, write_partitions
from sllm_loaderd.convert.plan import StoragePlan, alias_records, plan_storage
from sllm_loaderd.convert.ranks import AutoPlan, RankPlan, Share, assign
from sllm_loaderd.convert.source import TensorSource
from sllm_loaderd.convert.staging import staged
from sllm_loaderd.files import small_files, sync_directory, write_durable
from sllm_loaderd.layout import MIN_BLOCK
from sllm_runtime.protocol.checkpoint import (
    INDEX_NAME,
    CheckpointIndex,
    FileRecord,
    check_index,
    encode_index,
    index_digest,
)
from sllm_runtime.protocol.limits import CHUNK_BYTES, MIB

_COMPARE_BYTES = 4 * MIB
_CONFIG = "config.json"


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What the layout depends on. Nodes convert with the defaults, but for the size of their pools' chunks: where that
    is the same they agree on the digest."""

    chunk_bytes: int = CHUNK_BYTES
    min_block: int = MIN_BLOCK
    plan: RankPlan | AutoPlan | None = None
    """Which rank has what; all is in rank 0 without it."""
    keep: bool = False
    """Quantised tensors stay packed."""


def convert_directory(
    source: Path,
    target: Path,
    *,
    options: ConvertOptions | None = None,
    progress: Progress | None = None,
    verify: Progress | None = None,
) -> str:
    """Convert the model directory (or GGUF file) ``source`` to the checkpoint ``target`` and return its digest.

    ``target`` appears whole or not at all. Where ``verify`` is given, every bit is compared with the source before,
    and it is told how far that is. Raises ``InvalidCheckpoint``, ``UnsupportedModel``, ``CorruptCheckpoint`` if the
    comparison fails, or ``Conflict`` if ``target`` is there already.
    """
    with staged(target) as staging:
        return _write(source, staging, options or ConvertOptions(), progress, verify)


def write_checkpoint(
    source: Path, target: Path, *, options: ConvertOptions | None = None, progress: Progress | None = None
) -> str:
    """Write the checkpoint of ``source`` into the new directory ``target``, durable, and return its digest.

    What is there after an error is the caller's to remove.
    """
    target.mkdir()
    return _write(source, target, options or ConvertOptions(), progress, None)


def _write(
    source: Path, target: Path, options: ConvertOptions, progress: Progress | None, verify: Progress | None
) -> str:
    tensors = open_source(source, keep=options.keep)
    try:
        derived, given = tensors.extras.files, small_files(source) if source.is_dir() else {}
        if _CONFIG in derived:  # which it is not where the given one describes a model
            given.pop(_CONFIG, None)
        files = {**derived, **given}
        for name, data in files.items():
            write_durable(target / name, data)
        plan = _plan(target, tensors)
        shares, ranks = _shares(plan, options.plan, files)
        layouts = lay_out(plan, shares, ranks, options.min_block)
        written = write_partitions(target, tensors, plan, shares, layouts, options.chunk_bytes, progress)
        index = _index(plan, written, tensors, files, options)
        check_index(index)
        if verify is not None:
            from sllm_loaderd.convert.compare import compare_with_source

            compare_with_source(target, index, tensors, plan, verify)
    finally:
        tensors.close()
    encoded = encode_index(index)
    write_durable(target / INDEX_NAME, encoded)
    sync_directory(target)
    return index_digest(encoded)


def _index(
    plan: StoragePlan, written: Written, source: TensorSource, files: Mapping[str, bytes], options: ConvertOptions
) -> CheckpointIndex:
    stored = plan.stored
    return CheckpointIndex(
        partitions=written.partitions,
        blocks=written.blocks,
        tensors=written.tensors,
        aliases=alias_records(plan),
        views=written.views,
        splits=written.splits,
        quants=tuple(quant for quant in source.extras.quants if quant.name in stored),
        adapter=source.extras.adapter,
        files=tuple(FileRecord(n, len(d), hashlib.sha256(d).hexdigest()) for n, d in sorted(files.items())),
        layout=options.plan.layout if options.plan is not None else "hf",
        order=plan.kind,
        chunk_bytes=options.chunk_bytes,
    )


def _plan(directory: Path, source: TensorSource) -> StoragePlan:
    def same_bytes(a: str, b: str) -> bool:
        return _same_bytes(source, a, b)

    module = execution_plan(directory, {name: tensor.shape for name, tensor in source.tensors.items()})
    by_names = source.extras.adapter is not None
    return plan_storage(source.tensors, source.ties, module, same_bytes, by_names=by_names)


def _shares(
    plan: StoragePlan, ranks: RankPlan | AutoPlan | None, files: Mapping[str, bytes]
) -> tuple[dict[str, Share], int]:
    tensors = [stored.tensor for stored in plan.stored.values()]
    if ranks is None:
        return {name: Share((0,)) for name in (*plan.stored, *plan.ties)}, 1
    if isinstance(ranks, RankPlan):
        return assign(ranks, tensors, plan.ties), ranks.ranks
    return auto_shares(ranks, full_order(plan), tensors, plan.ties, _config(files)), ranks.ranks


def _config(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get(_CONFIG, b"{}"))
    except ValueError:
        return {}
    return config if isinstance(config, dict) else {}


def _same_bytes(source: TensorSource, a: str, b: str) -> bool:
    nbytes = source.tensors[a].nbytes
    one, two = bytearray(_COMPARE_BYTES), bytearray(_COMPARE_BYTES)
    for start in range(0, nbytes, _COMPARE_BYTES):
        count = min(_COMPARE_BYTES, nbytes - start)
        source.read(a, start, memoryview(one)[:count])
        source.read(b, start, memoryview(two)[:count])
        if one[:count] != two[:count]:
            return False
    return True
