"""The invoker's side: typed requests on the control socket, many at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast

from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import DeadlineExceeded, ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.loader import (
    PREWARM,
    Answer,
    Cancel,
    Delete,
    Describe,
    Done,
    Evict,
    Failed,
    GetStatus,
    Gone,
    Grant,
    Granted,
    Hello,
    ListModels,
    Load,
    LoadProgress,
    Message,
    ModelInfo,
    ModelList,
    Pin,
    Register,
    Reserve,
    Status,
    Validate,
    Welcome,
)

DEADLINE_S: Final = 30.0
Report = Callable[[str, int, int], None]
"""Called with stage (fetch, convert, validate, load), bytes done, bytes in all (0: not known)."""
T = TypeVar("T", bound=Message)


class _Pending:
    def __init__(self, report: Report | None) -> None:
        self.answer: asyncio.Future[tuple[Answer, list[int]]] = asyncio.get_running_loop().create_future()
        self.report = report


class LoaderControl:
    """The connection to a node's loaderd. Use ``async with LoaderControl(path)``, or ``open`` and ``close``.

    Every request raises the daemon's typed error, ``Unavailable`` once the daemon is gone (``lost`` is set then), and
    ``DeadlineExceeded``; a request that is cancelled or late is cancelled in the daemon too.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._wire: AsyncWire | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self.lost = asyncio.Event()
        """The daemon is gone; make a new ``LoaderControl``."""

    async def open(self, deadline_s: float = DEADLINE_S) -> Self:
        """Connect and exchange hellos. Raises ``Unavailable``."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_connect(sock, str(self._path))
                self._wire = AsyncWire(sock)
                self._wire.send(pack(Hello(name="control")))
                welcome = _decoded(await self._wire.receive())
        except (OSError, TimeoutError) as error:
            sock.close()
            raise Unavailable(f"loaderd at {self._path} cannot be reached: {error or 'no answer in time'}") from error
        if isinstance(welcome, Failed):
            self._wire.close()
            raise welcome.error.to_error()
        if not isinstance(welcome, Welcome):
            self._wire.close()
            raise ProtocolError(f"loaderd answered {type(welcome).__name__} to a hello")
        self._reader = asyncio.create_task(self._read(self._wire), name="loaderd control")
        return self

    async def close(self) -> None:
        """End the connection; requests under way raise ``Unavailable``. Repeatable."""
        if self._wire is not None:
            self._wire.close()
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=DEADLINE_S)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- requests -----------------------------------------------------------------------------------
    async def register(
        self, uri: str, *, digest: str = "", report: Report | None = None, deadline_s: float = 24 * 3600.0
    ) -> ModelInfo:
        """Have the model at ``uri`` in the node's store; ``digest``: only this content will do."""
        request = Register(request=next(self._numbers), uri=uri, digest=digest)
        return (await self._ask(request, ModelInfo, deadline_s, report=report))[0]

    async def models(self, deadline_s: float = DEADLINE_S) -> tuple[str, ...]:
        """Digests in the store."""
        return (await self._ask(ListModels(request=next(self._numbers)), ModelList, deadline_s))[0].models

    async def describe(self, model: str, deadline_s: float = DEADLINE_S) -> ModelInfo:
        """Everything about a model but its bytes."""
        return (await self._ask(Describe(request=next(self._numbers), model=model), ModelInfo, deadline_s))[0]

    async def validate(self, model: str, *, report: Report | None = None, deadline_s: float = 3600.0) -> None:
        """Compare every byte on disk with its digest. Raises ``CorruptCheckpoint``."""
        await self._ask(Validate(request=next(self._numbers), model=model), Done, deadline_s, report=report)

    async def delete(self, model: str, deadline_s: float = DEADLINE_S) -> None:
        """Remove a model from disk and memory."""
        await self._ask(Delete(request=next(self._numbers), model=model), Done, deadline_s)

    async def prefetch(
        self,
        model: str,
        partition: int = 0,
        blocks: Sequence[tuple[int, int]] = (),
        *,
        priority: str = PREWARM,
        report: Report | None = None,
        deadline_s: float = 3600.0,
    ) -> None:
        """Bring a partition, or ordered ranges of its blocks, into memory."""
        request = Load(
            request=next(self._numbers), model=model, partition=partition, blocks=tuple(blocks), priority=priority
        )
        await self._ask(request, Done, deadline_s, report=report)

    async def pin(self, model: str, pinned: bool = True, deadline_s: float = DEADLINE_S) -> None:
        """Keep a model in memory, or stop doing so."""
        await self._ask(Pin(request=next(self._numbers), model=model, pinned=pinned), Done, deadline_s)

    async def evict(self, model: str, deadline_s: float = DEADLINE_S) -> None:
        """Drop a model from memory."""
        await self._ask(Evict(request=next(self._numbers), model=model), Done, deadline_s)

    async def reserve(self, model: str, nbytes: int, deadline_s: float = DEADLINE_S) -> None:
        """Keep room in the pool for a model; 0 ends it."""
        await self._ask(Reserve(request=next(self._numbers), model=model, nbytes=nbytes), Done, deadline_s)

    async def grant(
        self,
        holder: str,
        model: str,
        partitions: Sequence[int] = (),
        *,
        pidfd: int | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> int:
        """A connection for the sandbox ``holder`` with rights to this model alone: a descriptor the caller owns.

        Pass the sandbox's pidfd where there is one; otherwise ``gone`` has to be called when it is dead.
        """
        fds = () if pidfd is None else (pidfd,)
        request = Grant(
            request=next(self._numbers), holder=holder, model=model, partitions=tuple(partitions), fds=len(fds)
        )
        return (await self._ask(request, Granted, deadline_s, fds=fds))[1][0]

    async def gone(self, holder: str, deadline_s: float = DEADLINE_S) -> None:
        """Every process of the sandbox ``holder`` is dead: its chunks may be used again."""
        await self._ask(Gone(request=next(self._numbers), holder=holder), Done, deadline_s)

    async def status(self, deadline_s: float = DEADLINE_S) -> Status:
        """What each tier holds, paths and queues."""
        return (await self._ask(GetStatus(request=next(self._numbers)), Status, deadline_s))[0]

    # --- wire -----------------------------------------------------------------------------------------
    async def _ask(
        self,
        request: Any,
        kind: type[T],
        deadline_s: float,
        *,
        report: Report | None = None,
        fds: Sequence[int] = (),
    ) -> tuple[T, list[int]]:
        wire = self._wire
        if wire is None or self.lost.is_set():
            raise Unavailable(f"loaderd at {self._path} is gone; it will be started again")
        number: int = request.request
        pending = self._pending[number] = _Pending(report)
        try:
            wire.send(pack(request), fds)
            async with asyncio.timeout(deadline_s):
                answer, received = await pending.answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"loaderd did not answer {type(request).__name__} within {deadline_s} s") from error
        finally:
            del self._pending[number]
            if not pending.answer.done() or pending.answer.cancelled():
                with contextlib.suppress(SllmError):
                    wire.send(pack(Cancel(request=number)))
        if isinstance(answer, Failed):
            raise answer.error.to_error()
        if not isinstance(answer, kind):
            raise ProtocolError(f"loaderd answered {type(request).__name__} by {type(answer).__name__}")
        return answer, received

    async def _read(self, wire: AsyncWire) -> None:
        try:
            while (payload := await wire.receive()) is not None:
                self._dispatch(wire, _decoded(payload))
        finally:
            self.lost.set()
            wire.close()
            for pending in self._pending.values():
                if not pending.answer.done():
                    pending.answer.set_exception(Unavailable(f"loaderd at {self._path} is gone"))

    def _dispatch(self, wire: AsyncWire, message: Answer) -> None:
        fds = wire.fds.take(message.fds) if isinstance(message, Granted) else []
        pending = self._pending.get(getattr(message, "request", 0))
        if pending is None or pending.answer.done():
            for fd in fds:  # of a grant whose asker gave up
                os.close(fd)
        elif isinstance(message, LoadProgress):
            if pending.report is not None:
                pending.report(message.stage, message.done, message.total)
        else:
            pending.answer.set_result((message, fds))


def _decoded(payload: bytes | None) -> Answer:
    if payload is None:
        raise Unavailable("loaderd closed the connection")
    answer: Answer = unpack(cast(Any, Answer), payload)
    return answer
