"""The invoker's side: typed requests on the control socket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from sllm_loaderd.client.control_wire import ControlWire, Report
from sllm_loaderd.client.keeping import KeptBatch, KeptDevice
from sllm_runtime.protocol.loader import (
    CPU,
    PREWARM,
    Adopt,
    AdoptDevice,
    Adopted,
    Copy,
    Delete,
    Describe,
    Done,
    Evict,
    GetStatus,
    Gone,
    Grant,
    Granted,
    Keep,
    ListModels,
    Load,
    ModelInfo,
    ModelList,
    Pin,
    Register,
    Reserve,
    Status,
    Validate,
)

DELETE_S: Final = 3600.0
"""What runs ends first, and files of many gigabytes take their time."""


class LoaderControl(ControlWire):
    """The connection to a node's loaderd. Use ``async with LoaderControl(path)``, or ``open`` and ``close``.

    Every request raises the daemon's typed error, ``Unavailable`` once the daemon is gone (``lost`` is set then), and
    ``DeadlineExceeded``; a request that is cancelled or late is cancelled in the daemon too.
    """

    async def register(
        self,
        uri: str,
        *,
        digest: str = "",
        convert: str = "",
        report: Report | None = None,
        deadline_s: float = 24 * 3600.0,
    ) -> ModelInfo:
        """Have the model at ``uri`` in the node's store; ``digest``: only this content will do."""
        request = Register(request=self.number, uri=uri, digest=digest, convert=convert)
        return (await self.ask(request, ModelInfo, deadline_s, report=report))[0]

    async def models(self, among: Sequence[str] = ()) -> tuple[str, ...]:
        """Digests in the store, of those ``among``; none named: all."""
        request = ListModels(request=self.number, among=tuple(among))
        return (await self.ask(request, ModelList))[0].models

    async def describe(self, model: str) -> ModelInfo:
        """Everything about a model but its bytes."""
        return (await self.ask(Describe(request=self.number, model=model), ModelInfo))[0]

    async def validate(self, model: str) -> None:
        """Compare every byte on disk with its digest. Raises ``CorruptCheckpoint``."""
        await self.ask(Validate(request=self.number, model=model), Done, 3600.0)

    async def delete(self, model: str) -> None:
        """Remove a model from disk and memory."""
        await self.ask(Delete(request=self.number, model=model), Done, DELETE_S)

    async def prefetch(
        self,
        model: str,
        partition: int = 0,
        *,
        device: str = CPU,
        priority: str = PREWARM,
        report: Report | None = None,
    ) -> None:
        """Bring a partition into memory, or to a device."""
        request = Load(
            request=self.number,
            model=model,
            partition=partition,
            device=device,
            priority=priority,
        )
        await self.ask(request, Done, 3600.0, report=report)

    async def copy(self, model: str, *, report: Report | None = None) -> None:
        """Have all of a model on this node's disk, and nothing more of it in memory."""
        await self.ask(Copy(request=self.number, model=model), Done, 24 * 3600.0, report=report)

    async def keep(self, models: Sequence[str]) -> None:
        """The models whose copies on the SSD tier go last, in place of those that were named before."""
        await self.ask(Keep(request=self.number, models=tuple(models)), Done)

    async def pin(self, model: str, pinned: bool = True) -> None:
        """Keep a model in memory, or stop doing so."""
        await self.ask(Pin(request=self.number, model=model, pinned=pinned), Done)

    async def evict(self, model: str) -> None:
        """Drop a model from memory."""
        await self.ask(Evict(request=self.number, model=model), Done)

    async def reserve(self, model: str, nbytes: int) -> None:
        """Keep room in the pool for a model; 0 ends it."""
        await self.ask(Reserve(request=self.number, model=model, nbytes=nbytes), Done)

    async def grant(
        self,
        holder: str,
        model: str,
        partitions: Sequence[int] = (),
        *,
        adapters: Sequence[str] = (),
        devices: Sequence[str] = (),
        sources: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
        pidfd: int | None = None,
    ) -> int:
        """A connection for the sandbox ``holder`` with rights to this model and these adapters (LoRA) alone, on these
        devices (none named: on all): a descriptor the caller owns. Adapters with ``sources`` need not be there yet.

        Pass the sandbox's pidfd where there is one; otherwise ``gone`` has to be called when it is dead.
        """
        fds = () if pidfd is None else (pidfd,)
        request = Grant(
            request=self.number,
            holder=holder,
            model=model,
            partitions=tuple(partitions),
            adapters=tuple(adapters),
            devices=tuple(devices),
            sources=dict(sources),
            fds=len(fds),
        )
        return (await self.ask(request, Granted, fds=fds))[1][0]

    async def gone(self, holder: str) -> None:
        """Every process of the sandbox ``holder`` is dead: its chunks may be used again."""
        await self.ask(Gone(request=self.number, holder=holder), Done)

    async def status(self, *, begun: bool = False) -> Status:
        """What each tier holds, paths and queues. ``begun``: the node has, see ``GetStatus``."""
        return (await self.ask(GetStatus(request=self.number, begun=begun), Status))[0]

    async def adopt(self, batch: KeptBatch) -> Adopted:
        """Bring back chunks that an earlier loaderd handed out; which of them serve, or are at least counted."""
        request = Adopt(
            request=self.number,
            model=batch.model,
            partition=batch.partition,
            chunk_bytes=batch.chunk_bytes,
            numbers=batch.numbers,
            ids=batch.ids,
            holders=batch.holders,
            fds=len(batch.fds),
        )
        return (await self.ask(request, Adopted, fds=batch.fds))[0]

    async def adopt_device(self, kept: KeptDevice) -> Adopted:
        """Bring back device memory that an earlier loaderd handed out."""
        memory = kept.memory
        request = AdoptDevice(
            request=self.number,
            id=memory.id,
            model=memory.model,
            partition=memory.partition,
            device=memory.device,
            nbytes=memory.nbytes,
            size=memory.size,
            holders=tuple(sorted(kept.holders)),
        )
        return (await self.ask(request, Adopted, fds=(kept.fd,)))[0]
