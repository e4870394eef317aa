"""Duplicates of descriptors (chunks, device memory), kept for a loaderd that may be killed: what systemd's descriptor
store is to it.

They come from loaderd alone, over the control socket; what a sandbox has never gets here. Not thread-safe.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sllm_runtime.protocol.limits import MAX_FDS
from sllm_runtime.protocol.loader import Store, StoreDevice


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """Chunks of one partition that the same sandboxes hold, as one ``Adopt`` brings them: at most ``MAX_FDS``."""

    model: str
    partition: int
    chunk_bytes: int
    holders: tuple[str, ...]
    numbers: tuple[int, ...]
    ids: tuple[int, ...]
    fds: tuple[int, ...]
    """The keeper's own: send them, do not close them."""


@dataclass(slots=True)
class _Kept:
    fd: int
    model: str
    partition: int
    chunk_bytes: int
    number: int
    holders: set[str]


@dataclass(frozen=True, slots=True)
class KeptDevice:
    """Device memory, as ``AdoptDevice`` brings it. ``fd`` is the keeper's own."""

    memory: StoreDevice
    fd: int
    holders: frozenset[str]


class KeptChunks:
    """Chunks and device memory by id. Owns their descriptors until they are dropped or ``close``."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}
        self._devices: dict[int, KeptDevice] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._kept) + len(self._devices)

    def store_device(self, message: StoreDevice, fds: Sequence[int]) -> None:
        """Keep what ``message`` names, or another holder of it. After ``close`` it is closed."""
        known = self._devices.get(message.id)
        if self._closed or (known is not None and fds):
            for fd in fds:
                os.close(fd)
        if self._closed or (known is None and not fds):
            return
        holders = known.holders if known is not None else frozenset()
        fd = known.fd if known is not None else fds[0]
        self._devices[message.id] = KeptDevice(message, fd, holders | {message.holder})

    def devices(self) -> list[KeptDevice]:
        """The device memory that is kept, as it is brought back."""
        return list(self._devices.values())

    def store(self, message: Store, fds: Sequence[int]) -> None:
        """Keep what ``message`` names; ``fds`` belong to the first of its ids. After ``close`` they are closed."""
        if self._closed:
            for fd in fds:
                os.close(fd)
            return
        for number, id, fd in zip(message.numbers, message.ids, fds, strict=False):
            self.drop([id])
            self._kept[id] = _Kept(fd, message.model, message.partition, message.chunk_bytes, number, set())
        for id in message.ids:
            if id in self._kept:
                self._kept[id].holders.add(message.holder)

    def drop(self, ids: Collection[int]) -> None:
        """Close these; those unknown are no error."""
        for id in ids:
            kept = self._kept.pop(id, None)
            if kept is not None:
                os.close(kept.fd)
            if (device := self._devices.pop(id, None)) is not None:
                os.close(device.fd)

    def gone(self, holder: str) -> None:
        """A sandbox is dead. Its chunks stay for others, and as memory that loaderd may still have in use."""
        for kept in self._kept.values():
            kept.holders.discard(holder)
        for id, device in self._devices.items():
            self._devices[id] = replace(device, holders=device.holders - {holder})

    def living(self, holders: Collection[str]) -> None:
        """These live and no others: of one that died as it was given something loaderd may have told behind its end."""
        for kept in self._kept.values():
            kept.holders.intersection_update(holders)
        for id, device in self._devices.items():
            self._devices[id] = replace(device, holders=device.holders.intersection(holders))

    def batches(self) -> list[KeptBatch]:
        """All that is kept, as it is brought back."""
        groups: dict[tuple[str, int, int, tuple[str, ...]], list[int]] = {}
        for id, kept in self._kept.items():
            key = (kept.model, kept.partition, kept.chunk_bytes, tuple(sorted(kept.holders)))
            groups.setdefault(key, []).append(id)
        return [
            self._batch(key, ids[start : start + MAX_FDS])
            for key, ids in groups.items()
            for start in range(0, len(ids), MAX_FDS)
        ]

    def close(self) -> None:
        """Drop everything, and all that comes later. Repeatable."""
        self._closed = True
        self.drop([*self._kept, *self._devices])

    def _batch(self, key: tuple[str, int, int, tuple[str, ...]], ids: list[int]) -> KeptBatch:
        kept = [self._kept[id] for id in ids]
        return KeptBatch(*key, tuple(k.number for k in kept), tuple(ids), tuple(k.fd for k in kept))
