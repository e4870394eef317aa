"""The control connection: what the node's invoker may ask. Each request is a task; ``Cancel`` ends one."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from typing import Final

from sllm_loaderd.adoption import adopt
from sllm_loaderd.daemon.connection import Connection, as_error, close_all
from sllm_loaderd.daemon.holders import Holders
from sllm_loaderd.daemon.keeper import Keeper
from sllm_loaderd.daemon.sandbox import Rights
from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.daemon.shown import shown
from sllm_loaderd.device_adoption import adopt_device
from sllm_loaderd.store import StoredModel
from sllm_runtime.platform import trace
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.errors import ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.loader import (
    CPU,
    MOST_REQUESTS,
    Adopt,
    AdoptDevice,
    Adopted,
    Answer,
    Cancel,
    ControlRequest,
    Copy,
    Delete,
    Describe,
    Done,
    Evict,
    GetStatus,
    Gone,
    Grant,
    Granted,
    Hello,
    Keep,
    ListModels,
    Load,
    LoadProgress,
    ModelList,
    Pin,
    Register,
    Request,
    Reserve,
    Status,
    Stored,
    Validate,
    Welcome,
)

log = logging.getLogger(__name__)

_ALWAYS: Final = (Gone, GetStatus)
"""Answered however much is under way: the one frees memory, by the other the invoker knows that loaderd lives."""


class ControlConnection:
    """Serves one control client. Owns the wire and the tasks of its requests."""

    def __init__(self, wire: AsyncWire, service: LoaderService, holders: Holders) -> None:
        self._connection = Connection(wire, ControlRequest)
        self._service = service
        self._holders = holders
        self._keeper = Keeper(self._connection.say)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._untold = 0

    async def serve(self) -> None:
        """Until the peer is gone; its requests are cancelled then."""
        try:
            hello = await self._connection.greet(Welcome(node=self._service.settings.node))
            if hello is not None:
                if hello.keeps:
                    self._holders.keeps(self, self._keeper)
                async with asyncio.TaskGroup() as group:
                    await self._listen(group)
                    for task in self._tasks.values():
                        task.cancel()
        # Whatever ends one connection, the daemon goes on for the others.
        except* (SllmError, OSError) as errors:
            log.warning("control connection: %s", errors.exceptions[0])
            self._connection.fail(0, as_error(errors.exceptions[0]))
        finally:
            self._holders.owner_lost(self)
            await self._connection.close()

    async def _listen(self, group: asyncio.TaskGroup) -> None:
        while (message := await self._connection.receive()) is not None:
            if isinstance(message, Cancel):
                if (task := self._tasks.get(message.request)) is not None:
                    task.cancel()
            elif isinstance(message, Stored):
                self._keeper.stored(message.batch)
            elif isinstance(message, Hello):
                raise ProtocolError("a second hello")
            elif message.request in self._tasks:
                raise ProtocolError(f"request {message.request} is under way already")
            else:
                # Descriptors are taken here, in the order of the messages they came with.
                fds = self._connection.take_fds(message.fds) if isinstance(message, Grant | Adopt | AdoptDevice) else []
                if len(self._tasks) >= MOST_REQUESTS and not isinstance(message, _ALWAYS):
                    close_all(fds)
                    error = Unavailable(f"this node's loader is busy with {MOST_REQUESTS} requests; ask again")
                    self._connection.fail(message.request, error)
                    continue
                with trace.within(message.traceparent):
                    task = self._tasks[message.request] = group.create_task(self._answer(message, fds))
                task.add_done_callback(partial(self._ended, message.request, fds))

    def _ended(self, number: int, fds: list[int], task: asyncio.Task[None]) -> None:
        """Also of one that was cancelled before it began, of which nothing has run."""
        close_all(fds)
        del self._tasks[number]
        if task.cancelled():
            self._connection.fail(number, as_error(asyncio.CancelledError()))

    async def _answer(self, request: Request, fds: list[int]) -> None:
        try:
            if isinstance(request, Grant):
                await self._grant(request, fds)
            elif isinstance(request, Adopt):
                self._connection.say(await self._adopt(request, fds))
            elif isinstance(request, AdoptDevice):
                self._connection.say(await self._adopt_device(request, fds))
            else:
                self._connection.say(await self._perform(request))
        # Whatever one request meets, the daemon goes on and says so to who asked.
        except Exception as error:
            if not isinstance(error, (SllmError, OSError)):
                log.exception("request %s", request)
            self._connection.fail(request.request, as_error(error))

    async def _perform(self, request: Request) -> Answer:
        service, number = self._service, request.request
        match request:
            case Register(uri=uri, digest=digest, convert=convert):
                info = await service.register(uri, digest, self._reporter(number), convert)
                return _numbered(info, number)
            case Describe(model=model):
                return _numbered(await service.describe(model), number)
            case Validate(model=model):
                await service.validate(model, self._reporter(number))
            case Delete(model=model):
                await service.delete(model)
            case Copy(model=model):
                await service.copying.copy(model, self._reporter(number))
            case Load():
                await self._prefetch(request)
            case _:
                return await self._manage(request)
        return Done(request=number)

    async def _manage(self, request: Request) -> Answer:
        """What is answered at once: lists, status, and what stays in memory."""
        service, number = self._service, request.request
        match request:
            case ListModels(among=among):
                there = await asyncio.to_thread(service.store.digests)
                wanted = set(among or there)
                return ModelList(request=number, models=tuple(digest for digest in there if digest in wanted))
            case GetStatus(begun=begun):
                if begun:
                    service.measuring.begun()
                return self._status(number)
            case Keep(models=models):
                service.store.ssd.keep(models)
            case Pin(model=model, pinned=pinned):
                service.pin(model, pinned)
            case Evict(model=model):
                await service.evict(model)
            case Reserve(model=model, nbytes=nbytes):
                service.residency.reserve(model, nbytes)
            case Gone(holder=holder):
                self._holders.gone(holder)
            case _:
                raise ProtocolError(f"{type(request).__name__} is not served here")
        return Done(request=number)

    def _reporter(self, number: int) -> Reporter:
        return Reporter(self._connection, number)

    async def _prefetch(self, request: Load) -> None:
        """Bring blocks into memory for nobody yet; cancelled with the request."""
        finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done() -> None:
            if not finished.done():
                finished.set_result(None)

        def failed(error: SllmError) -> None:
            if not finished.done():
                finished.set_exception(error)

        report = self._reporter(request.request)
        loading = await self._service.load(
            request,
            "",
            ready=lambda block: None,
            progress=lambda there, total: report("load", there, total),
            done=done,
            failed=failed,
        )
        loading.start()
        try:
            await finished
        finally:
            loading.cancel()

    async def _grant(self, request: Grant, fds: list[int]) -> None:
        await self._service.model(request.model)  # a model that is broken is refused here, not in the sandbox
        for adapter in request.adapters:
            if adapter not in request.sources:
                await self._service.model(adapter)
        for device in request.devices:
            if device != CPU:
                self._service.devices.get(device)
        rights = Rights(
            request.holder, request.model, request.partitions, request.adapters, request.devices, request.sources
        )
        theirs = self._holders.grant(self, rights, fds[0] if fds else None)
        log.info("sandbox %s may load %s", request.holder, request.model)
        try:
            self._connection.say(Granted(request=request.request), [theirs])
        finally:
            os.close(theirs)

    async def _adopt(self, request: Adopt, fds: list[int]) -> Adopted:
        self._holders.declare(self, request.holders)
        model = await self._known(request.model)
        answer = await adopt(request, fds, model, self._service.pool, self._service.residency)
        self._keeper.adopted((*answer.ids, *answer.counted))
        return answer

    async def _adopt_device(self, request: AdoptDevice, fds: list[int]) -> Adopted:
        if not fds:
            raise ProtocolError("device memory is brought without its descriptor")
        self._holders.declare(self, request.holders)
        device, model = self._service.devices.get(request.device), await self._known(request.model)
        answer = await adopt_device(request, fds[0], model, device, self._service.stage, self._service.counted)
        self._keeper.adopted((*answer.ids, *answer.counted))
        return answer

    async def _known(self, digest: str) -> StoredModel | None:
        """The model that kept memory is of; without one the memory counts all the same."""
        try:
            return await self._service.model(digest)
        except SllmError as error:
            log.warning("kept memory of %s: %s", digest, error)
            return None

    def _status(self, number: int) -> Status:
        pool, resident, paths = self._service.status()
        models = self._service.store.digests()
        whole = Status(
            request=number,
            pid=os.getpid(),
            pool=pool,
            resident=resident,
            paths=paths,
            models=tuple(models),
            disk_free=self._service.store.disk_free(),
            devices=self._service.devices.status(),
            remote=tuple(self._service.store.remote(models)),
            ssd=self._service.store.ssd.report(),
            integrity=self._service.settings.integrity,
        )
        status = shown(whole, self._service.recent())
        if status.untold and not self._untold:
            log.warning("a status has no room for all models: of %d it says nothing", status.untold)
        self._untold = status.untold
        return status


class Reporter:
    """Tells a client how far its request is."""

    def __init__(self, connection: Connection, number: int) -> None:
        self._connection = connection
        self._number = number

    def __call__(self, stage: str, done: int, total: int) -> None:
        self._connection.say(LoadProgress(request=self._number, stage=stage, done=done, total=total))


def _numbered(info: Answer, number: int) -> Answer:
    import msgspec

    return msgspec.structs.replace(info, request=number)
