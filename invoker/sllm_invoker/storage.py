"""What a node's report says of its storage, from what its loaderd says of itself. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from sllm_runtime.protocol.loader import PRIORITIES, START, Status
from sllm_runtime.protocol.node import DeviceMemory, PathLoad, StartInstance, Storage

_AHEAD = PRIORITIES[: PRIORITIES.index(START) + 1]
"""Classes that a start waits behind: a prefetch and a write-back let it pass."""


def resident(status: Status) -> tuple[str, ...]:
    """Models all of whose partitions are in memory, wholly: room is made by single ones."""
    there = Counter(part.model for part in status.resident if part.total)
    lacking = {
        part.model for part in status.resident if part.nbytes < part.total or there[part.model] < part.partitions
    }
    return tuple(sorted({part.model for part in status.resident} - lacking))


def remote(status: Status) -> tuple[str, ...]:
    """Models that are known here and whose bytes are at a source, not on this node's SSD."""
    copied = {model for model, _, _ in status.ssd.copies} if status.ssd is not None else set()
    return tuple(sorted(set(status.remote) - copied))


def copied(status: Status) -> dict[str, int]:
    """Bytes of the copies on the SSD tier, by model."""
    found: dict[str, int] = {}
    for model, _, nbytes in status.ssd.copies if status.ssd is not None else ():
        found[model] = found.get(model, 0) + nbytes
    return found


def storage(status: Status) -> Storage:
    """What there is to load from and to."""
    return Storage(
        dram_ready=status.pool.prefaulted,
        ssd_used=status.ssd.used if status.ssd is not None else 0,
        ssd_limit=status.ssd.limit if status.ssd is not None else 0,
        disk_free=status.disk_free,
        integrity=status.integrity,
        devices=tuple(DeviceMemory(device=each.name, limit=each.limit, used=each.used) for each in status.devices),
    )


def dram_used(status: Status) -> int:
    """Bytes of the pool that models have, also those that go when their sandboxes do."""
    return status.pool.used + status.pool.retiring


def path_loads(status: Status) -> tuple[PathLoad, ...]:
    """The paths with what a start that begins now waits behind."""
    return tuple(
        PathLoad(
            path=path.path,
            bandwidth=path.bandwidth,
            queued=sum(path.queued.get(name, 0) for name in _AHEAD),
            served=bool(path.mode),  # a probe has none
        )
        for path in status.paths
    )


def coming(starting: Iterable[StartInstance], shown: Collection[str], status: Status | None) -> int:
    """Bytes of the weights of starts that are not among those ``shown`` in the queues of ``status``: whoever starts
    next waits behind them too."""
    there = resident(status) if status is not None else ()
    models = (order.model for order in starting if order.instance not in shown)
    return sum(model.nbytes for model in models if model is not None and model.digest not in there)
