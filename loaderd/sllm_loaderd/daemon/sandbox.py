"""A sandbox's connection: loads of one model and its adapters, nothing else.

It ends with the socket; what it held stays held till Gone.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sllm_loaderd.daemon.connection import GRANTED_HELLO_S, Connection, as_error
from sllm_loaderd.daemon.keeper import DeviceHandout, Handout
from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.loading import DeviceLoad, Loading, MemoryLoad
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.errors import Cancelled, Forbidden, ProtocolError, SllmError
from sllm_runtime.protocol.limits import MAX_FDS
from sllm_runtime.protocol.loader import (
    Cancel,
    Chunks,
    Detach,
    DeviceMemory,
    Done,
    Files,
    Hello,
    Load,
    LoadProgress,
    Ready,
    Reorder,
    SandboxRequest,
    Welcome,
)

log = logging.getLogger(__name__)
_MOST_LOADS = 64


@dataclass(frozen=True, slots=True)
class Rights:
    """What a sandbox may have, in the name of ``holder``: partitions (none named: all) of one model, and adapters.

    ``devices`` to which it may load; none named: all. ``sources`` of adapters that the node may lack, by digest.
    """

    holder: str
    model: str
    partitions: tuple[int, ...] = ()
    adapters: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()
    sources: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def check(self, model: str, partition: int, device: str) -> None:
        """Raises ``Forbidden`` naming what is not its own."""
        if model not in (self.model, *self.adapters):
            raise Forbidden(f"this sandbox may load {', '.join((self.model, *self.adapters))} only", field="model")
        if model == self.model and self.partitions and partition not in self.partitions:
            raise Forbidden(f"this sandbox may load partitions {self.partitions} only", field="partition")
        if self.devices and device not in self.devices:
            raise Forbidden(f"this sandbox may load to {', '.join(self.devices)} only", field="device")


class SandboxConnection:
    """Serves one sandbox. Owns the wire."""

    def __init__(
        self, wire: AsyncWire, rights: Rights, service: LoaderService, keep: Callable[[Handout | DeviceHandout], None]
    ) -> None:
        """``keep`` is called with what is about to be handed out."""
        self._connection = Connection(wire, SandboxRequest)
        self._rights = rights
        self._service = service
        self._keep = keep
        self._loads: dict[int, Loading] = {}
        self._bringing: dict[int, asyncio.Task[None]] = {}
        """Loads of adapters that come to the node first, each until its task has ended; cancelling one is safe."""
        self._closed = False

    async def serve(self) -> None:
        """Until the peer is gone. Loads under way are cancelled then."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._converse(group)
                for task in self._bringing.values():
                    task.cancel()
        finally:
            for request in list(self._loads):
                self._forget(request)
            await self._connection.close()

    async def _converse(self, group: asyncio.TaskGroup) -> None:
        rights = self._rights
        welcome = Welcome(
            node=self._service.settings.node,
            model=rights.model,
            partitions=rights.partitions,
            adapters=rights.adapters,
        )
        try:
            if await self._connection.greet(welcome, GRANTED_HELLO_S):
                while (message := await self._connection.receive()) is not None:
                    await self._handle(message, group)
                    # Answers hold descriptors: who does not take them is not answered further.
                    await self._connection.wire.drain()
        except ProtocolError as error:
            log.warning("sandbox %s: %s", rights.holder, error)
            self._connection.fail(0, error)
        # Whatever one sandbox says, the daemon goes on for the others.
        except Exception as error:
            log.exception("sandbox %s", rights.holder)
            self._connection.fail(0, as_error(error))

    def close(self) -> None:
        """End ``serve``."""
        self._closed = True
        self._connection.wire.close()

    async def _handle(self, message: SandboxRequest, group: asyncio.TaskGroup) -> None:
        if isinstance(message, Load):
            try:
                if self._far(message):
                    self._begin_to_bring(message, group)
                else:
                    self._require_free(message.request)
                    await self._load(message)
            except (SllmError, OSError) as error:
                self._connection.fail(message.request, as_error(error))
        elif isinstance(message, Cancel):
            if self._forget(message.request):
                self._connection.fail(message.request, Cancelled("the load was cancelled"))
        elif isinstance(message, Detach):
            # The word of a sandbox frees nothing: it may keep its mappings. See ``Gone``.
            self._forget(message.request)
        elif isinstance(message, Reorder):
            self._reorder(message)
        elif isinstance(message, Hello):
            raise ProtocolError("a second hello")

    def _far(self, request: Load) -> bool:
        """Whether its adapter has to come to this node first."""
        return request.model in self._rights.sources and self._service.lacks(request.model)

    def _require_free(self, number: int) -> None:
        """Raises ``ProtocolError`` for a load too many, or one whose number another has: what is cancelled and has not
        ended yet has its own, and counts. So does what comes to the node first: it goes on as a load."""
        under_way = self._loads.keys() | self._bringing.keys()
        if number in under_way or len(under_way) >= _MOST_LOADS:
            raise ProtocolError(f"load {number} is under way already, or {_MOST_LOADS} are")

    def _begin_to_bring(self, request: Load, group: asyncio.TaskGroup) -> None:
        self._require_free(request.request)
        task = group.create_task(self._bring(request), name=f"bring {request.model}")
        self._bringing[request.request] = task
        task.add_done_callback(lambda _: self._bringing.pop(request.request))

    async def _bring(self, request: Load) -> None:
        """``_load`` behind the registration; other loads of the sandbox go on meanwhile."""
        try:
            await self._service.bring(request.model, self._rights.sources[request.model])
            await self._load(request)
        # As in ``_converse``: whatever one load meets, the others go on.
        except Exception as error:
            if not isinstance(error, (SllmError, OSError)):
                log.exception("sandbox %s", self._rights.holder)
            self._connection.fail(request.request, as_error(error))

    async def _load(self, request: Load) -> None:
        rights, number = self._rights, request.request
        model = request.model or rights.model
        rights.check(model, request.partition, request.device)
        say = self._connection.say

        def failed(error: SllmError) -> None:
            self._loads.pop(number, None)
            self._connection.fail(number, error)

        def done() -> None:
            self._loads.pop(number, None)
            say(Done(request=number))

        asked = Load(
            request=number,
            model=model,
            partition=request.partition,
            blocks=request.blocks,
            device=request.device,
            priority=request.priority,
        )
        loading = await self._service.load(
            asked,
            rights.holder,
            ready=lambda block: say(Ready(request=number, block=block)),
            progress=lambda there, total: say(LoadProgress(request=number, stage="load", done=there, total=total)),
            done=done,
            failed=failed,
        )
        if self._closed:  # the sandbox died meanwhile, and nothing may be held in its name
            loading.cancel()
            self._service.forget(rights.holder)
            return
        self._loads[number] = loading
        try:
            self._send_memory(number, loading)
        except (OSError, SllmError):  # no descriptor is left, or the device's driver gives none
            self._forget(number)
            raise
        loading.start()

    def _send_memory(self, number: int, loading: Loading) -> None:
        self._connection.say(Files(request=number, files=loading.model.files), [loading.model.fd])
        if isinstance(loading, MemoryLoad):
            self._send_chunks(number, loading)
        else:
            self._send_device_memory(number, loading)

    def _send_chunks(self, number: int, loading: MemoryLoad) -> None:
        holder, size = self._rights.holder, loading.model.index.chunk_bytes
        # What may outlive this process is kept first: whoever kills it in between leaves nothing that nobody counts.
        new = tuple(pair for pair in zip(loading.numbers, loading.chunks, strict=True) if holder not in pair[1].holders)
        self._keep(Handout(holder, loading.model.checkpoint.digest, loading.rank, size, new))
        self._service.residency.hold(loading.chunks, holder)
        numbers, fds = loading.numbers, [chunk.fd for chunk in loading.chunks]
        huge = self._service.pool.huge_pages
        for start in range(0, max(len(numbers), 1), MAX_FDS):
            batch = numbers[start : start + MAX_FDS]
            last = start + MAX_FDS >= len(numbers)
            answer = Chunks(request=number, numbers=batch, chunk_bytes=size, fds=len(batch), last=last, huge_pages=huge)
            self._connection.say(answer, fds[start : start + MAX_FDS])

    def _send_device_memory(self, number: int, loading: DeviceLoad) -> None:
        part, allocation = loading.part, loading.allocation
        model, device = part.model.checkpoint.digest, part.device.name
        self._keep(DeviceHandout(self._rights.holder, model, loading.rank, device, part.id, allocation))
        fd = allocation.export()
        try:
            answer = DeviceMemory(
                request=number,
                device=loading.part.device.name,
                nbytes=allocation.nbytes,
                size=allocation.size,
                uuid=loading.part.device.uuid,
                kind=allocation.kind,
                handle=allocation.handle,
                fds=int(fd is not None),
            )
            self._connection.say(answer, [] if fd is None else [fd])
        finally:
            if fd is not None:
                os.close(fd)

    def _reorder(self, message: Reorder) -> None:
        loading = self._loads.get(message.request)
        if loading is None:
            return  # it has just ended
        try:
            loading.reorder(message.blocks)
        except SllmError as error:
            self._forget(message.request)
            self._connection.fail(message.request, error)

    def _forget(self, request: int) -> bool:
        """Whether there was one, and it goes on no more."""
        if (found := self._loads.pop(request, None)) is not None:
            found.cancel()
            return True
        coming = self._bringing.get(request)
        return coming is not None and not coming.cancelling() and coming.cancel()
