"""Tensors that are more than one record: split over ranks, or packed. Their checks, and how to join them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from sllm_runtime.protocol.checkpoint.geometry import contiguous_stride
from sllm_runtime.protocol.checkpoint.names import bad
from sllm_runtime.protocol.checkpoint.records import (
    MAX_BYTES,
    MAX_DIMS,
    QUANT_BLOCKS,
    CheckpointIndex,
    QuantRecord,
    SplitRecord,
    TensorRecord,
)


def check_parts(index: CheckpointIndex) -> None:
    """Check ``index.splits`` and ``index.quants``. Raises ``InvalidCheckpoint``."""
    parts: dict[str, list[TensorRecord]] = {}
    for tensor in index.tensors:
        parts.setdefault(tensor.name, []).append(tensor)
    splits = {split.name: split for split in index.splits}
    if len(splits) != len(index.splits):
        raise bad("splits", "the same name stands there twice")
    for name, records in parts.items():
        if len(records) > 1 and name not in splits:
            raise bad(f"tensors[{name!r}]", "the same name stands there twice and no split says why")
    for split in index.splits:
        _check_split(split, parts.get(split.name, []))
    if len({quant.name for quant in index.quants}) != len(index.quants):
        raise bad("quants", "the same name stands there twice")
    for quant in index.quants:
        _check_quant(quant, parts.get(quant.name, []), splits)


def _check_split(split: SplitRecord, parts: Sequence[TensorRecord]) -> None:
    where = f"splits[{split.name!r}]"
    if len(split.ranks) < 2 or len(set(split.ranks)) != len(split.ranks):
        raise bad(where, f"ranks {split.ranks} are not two or more different ones")
    if {part.rank for part in parts} != set(split.ranks):
        raise bad(where, f"its parts are not in the ranks {split.ranks}")
    if len(split.shape) > MAX_DIMS or any(not 0 <= size <= MAX_BYTES for size in split.shape):
        raise bad(where, f"shape {split.shape} is wrong")
    if len({part.dtype for part in parts}) != 1 or any(part.stride != contiguous_stride(part.shape) for part in parts):
        raise bad(where, "its parts have several dtypes, or are not contiguous")
    dim = split.dim
    if dim is None:
        if any(part.shape != split.shape for part in parts):
            raise bad(where, "a rank has another shape than the whole")
        return
    if not 0 <= dim < len(split.shape) or any(len(part.shape) != len(split.shape) for part in parts):
        raise bad(where, f"dimension {dim} is none of {split.shape}, or a part has other dimensions")
    if sum(part.shape[dim] for part in parts) != split.shape[dim]:
        raise bad(where, f"its parts do not add up to {split.shape[dim]} along dimension {dim}")
    rest = (*split.shape[:dim], *split.shape[dim + 1 :])
    if any((*part.shape[:dim], *part.shape[dim + 1 :]) != rest for part in parts):
        raise bad(where, f"a part differs from the whole in another dimension than {dim}")


def _check_quant(quant: QuantRecord, parts: Sequence[TensorRecord], splits: Mapping[str, SplitRecord]) -> None:
    where = f"quants[{quant.name!r}]"
    if quant.kind not in QUANT_BLOCKS:
        raise bad(where, f"kind {quant.kind!r} is unknown")
    if not parts or parts[0].dtype != "uint8":
        raise bad(where, "there is no such tensor of uint8")
    split = splits.get(quant.name)
    shape = split.shape if split is not None else parts[0].shape
    elements, nbytes = QUANT_BLOCKS[quant.kind]
    if not quant.shape or len(quant.shape) > MAX_DIMS or quant.shape[-1] % elements or min(quant.shape) < 0:
        raise bad(where, f"shape {quant.shape} is no whole number of blocks of {elements}")
    if shape != (*quant.shape[:-1], quant.shape[-1] // elements * nbytes):
        raise bad(where, f"{shape} bytes are not the blocks of {quant.shape}")


def piece_bounds(size: int, parts: int) -> list[tuple[int, int]]:
    """``[start, stop)`` of each of ``parts`` pieces of a dimension of ``size``; sizes differ by one at most."""
    ends = [size * number // parts for number in range(parts + 1)]
    return list(pairwise(ends))
