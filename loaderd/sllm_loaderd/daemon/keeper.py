"""Hands duplicates of what sandboxes get (chunks, device memory) to the client that keeps them, before they get it."""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.devices import Allocation
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import MAX_FDS
from sllm_runtime.protocol.loader import Store, StoreDevice, Unstore

log = logging.getLogger(__name__)
_IN_FLIGHT: Final = 4
"""Batches sent and not acknowledged: descriptors under way on a socket count against this process."""


@dataclass(frozen=True, slots=True)
class Handout:
    """Chunks of one partition that ``holder`` is being given, each with its number."""

    holder: str
    model: str
    partition: int
    chunk_bytes: int
    chunks: tuple[tuple[int, Chunk], ...]


@dataclass(frozen=True, slots=True)
class DeviceHandout:
    """Memory of a device that ``holder`` is being given; ``id`` names it."""

    holder: str
    model: str
    partition: int
    device: str
    id: int
    allocation: Allocation


class Keeper:
    """What one control client keeps. ``say`` sends it a message. Lives in the event loop.

    What waits is bounded: each chunk of the pool waits at most once for each sandbox that was given it.
    """

    def __init__(
        self, say: Callable[[Store | StoreDevice | Unstore, Sequence[int]], None], most_in_flight: int = _IN_FLIGHT
    ) -> None:
        self._say = say
        self._most_in_flight = most_in_flight
        self._batches = itertools.count(1)
        self._in_flight: set[int] = set()
        self._waiting: deque[Handout | DeviceHandout] = deque()
        self._kept: set[int] = set()

    def keep(self, handout: Handout) -> None:
        """Have the client keep these; call before they are handed out."""
        for start in range(0, len(handout.chunks), MAX_FDS):
            self._waiting.append(replace(handout, chunks=handout.chunks[start : start + MAX_FDS]))
        self._send()

    def keep_device(self, handout: DeviceHandout) -> None:
        """Have the client keep this; call before it is handed out."""
        self._waiting.append(handout)
        self._send()

    def adopted(self, ids: Iterable[int]) -> None:
        """The client brought these, so it has them."""
        self._kept.update(ids)

    def freed(self, ids: Collection[int]) -> None:
        """These chunks hold nothing of their model any more."""
        gone = set(ids)
        waiting, self._waiting = self._waiting, deque()
        for handout in waiting:
            if isinstance(handout, DeviceHandout):
                self._waiting.extend(() if handout.id in gone else (handout,))
            elif left := tuple(pair for pair in handout.chunks if pair[1].id not in gone):
                self._waiting.append(replace(handout, chunks=left))
        kept = sorted(gone & self._kept)
        self._kept -= gone
        for start in range(0, len(kept), MAX_FDS):
            self._say(Unstore(ids=tuple(kept[start : start + MAX_FDS])), ())

    def stored(self, batch: int) -> None:
        """The client has taken a batch."""
        self._in_flight.discard(batch)
        self._send()

    def _send(self) -> None:
        while self._waiting and len(self._in_flight) < self._most_in_flight:
            handout = self._waiting.popleft()
            if isinstance(handout, DeviceHandout):
                self._send_device(handout)
                continue
            pairs = sorted(handout.chunks, key=lambda pair: pair[1].id in self._kept)
            fresh = [chunk for _, chunk in pairs if chunk.id not in self._kept]
            message = Store(
                batch=next(self._batches),
                holder=handout.holder,
                model=handout.model,
                partition=handout.partition,
                chunk_bytes=handout.chunk_bytes,
                numbers=tuple(number for number, _ in pairs),
                ids=tuple(chunk.id for _, chunk in pairs),
                fds=len(fresh),
            )
            try:
                self._say(message, [chunk.fd for chunk in fresh])
            except OSError as error:  # short of descriptors: these chunks would not outlive this process
                log.warning("chunks cannot be kept for a restart: %s", error)
                continue
            self._in_flight.add(message.batch)
            self._kept.update(chunk.id for chunk in fresh)

    def _send_device(self, handout: DeviceHandout) -> None:
        try:
            fd = handout.allocation.export() if handout.id not in self._kept else None
        except (OSError, Unavailable) as error:
            log.warning("memory on %s cannot be kept for a restart: %s", handout.device, error)
            return
        if fd is None and handout.id not in self._kept:
            return  # it has no descriptor: what it takes of its device is the driver's to say
        message = StoreDevice(
            batch=next(self._batches),
            holder=handout.holder,
            id=handout.id,
            model=handout.model,
            partition=handout.partition,
            device=handout.device,
            nbytes=handout.allocation.nbytes,
            size=handout.allocation.size,
            fds=int(fd is not None),
        )
        try:
            self._say(message, [] if fd is None else [fd])
        except OSError as error:
            log.warning("memory on %s cannot be kept for a restart: %s", handout.device, error)
            return
        finally:
            if fd is not None:
                os.close(fd)
        self._in_flight.add(message.batch)
        self._kept.add(handout.id)
