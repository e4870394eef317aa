"""Requests and answers over loaderd's control socket, many at a time: the wire under `LoaderControl`."""

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

from msgspec import structs

from sllm_loaderd.client.keeping import KeptChunks
from sllm_runtime.platform import trace
from sllm_runtime.platform.wire import AsyncWire
from sllm_runtime.protocol.codec import pack, unpack
from sllm_runtime.protocol.errors import DeadlineExceeded, ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.loader import (
    MOST_REQUESTS,
    Answer,
    Cancel,
    Copy,
    Delete,
    Failed,
    Granted,
    Hello,
    Load,
    LoadProgress,
    Message,
    Register,
    Store,
    Stored,
    StoreDevice,
    Unstore,
    Validate,
    Welcome,
)

DEADLINE_S: Final = 30.0
_MOST_SHORT: Final = MOST_REQUESTS // 4
"""Requests that are answered soon (grants, status), of what loaderd takes at a time."""
_MOST_LONG: Final = MOST_REQUESTS // 2
"""Those that may take minutes: further ones wait here, and the short ones do not wait for them. The rest is for
those that were cancelled and have not ended yet."""
Report = Callable[[str, int, int], None]
"""Called with stage (fetch, convert, validate, load), bytes done, bytes in all (0: not known)."""
T = TypeVar("T", bound=Message)


class _Pending:
    def __init__(self, report: Report | None) -> None:
        self.answer: asyncio.Future[tuple[Answer, list[int]]] = asyncio.get_running_loop().create_future()
        self.report = report


class ControlWire:
    """Owns the connection. Every request raises the daemon's typed error, ``Unavailable`` once it is gone, and
    ``DeadlineExceeded``; one that is cancelled or late is cancelled in the daemon too.
    """

    def __init__(self, path: Path, kept: KeptChunks | None = None) -> None:
        """``kept``: where duplicates of the chunks' descriptors are kept, so that they outlive loaderd (``adopt``)."""
        self._path = path
        self._kept = kept
        self._wire: AsyncWire | None = None
        self._reader: asyncio.Task[None] | None = None
        self._numbers = itertools.count(1)
        self._pending: dict[int, _Pending] = {}
        self._short = asyncio.Semaphore(_MOST_SHORT)
        self._long = asyncio.Semaphore(_MOST_LONG)
        self.lost = asyncio.Event()
        """The daemon is gone; make a new ``LoaderControl``."""

    async def open(self, deadline_s: float = DEADLINE_S) -> Self:
        """Connect and exchange hellos. Raises ``Unavailable``."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"loaderd at {self._path} cannot be reached: {error}") from error
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_connect(sock, str(self._path))
                self._wire = AsyncWire(sock)
                self._wire.send(pack(Hello(name="control", keeps=self._kept is not None)))
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

    @property
    def number(self) -> int:
        """A number for the next request."""
        return next(self._numbers)

    async def ask(
        self,
        request: Any,
        kind: type[T],
        deadline_s: float = DEADLINE_S,
        *,
        report: Report | None = None,
        fds: Sequence[int] = (),
    ) -> tuple[T, list[int]]:
        """Send ``request`` (numbered by ``number``) and wait for an answer of ``kind``: it, and its descriptors."""
        try:
            async with asyncio.timeout(deadline_s), self._turns(request):
                answer, received = await self._answer(request, report, fds)
        except TimeoutError as error:
            raise DeadlineExceeded(f"loaderd did not answer {type(request).__name__} within {deadline_s} s") from error
        if isinstance(answer, Failed):
            raise answer.error.to_error()
        if not isinstance(answer, kind):
            raise ProtocolError(f"loaderd answered {type(request).__name__} by {type(answer).__name__}")
        return answer, received

    def _turns(self, request: Any) -> asyncio.Semaphore:
        return self._long if isinstance(request, Register | Validate | Copy | Load | Delete) else self._short

    async def _answer(self, request: Any, report: Report | None, fds: Sequence[int]) -> tuple[Answer, list[int]]:
        wire = self._wire
        if wire is None or self.lost.is_set():
            raise Unavailable(f"loaderd at {self._path} is gone; it will be started again")
        pending = self._pending[request.request] = _Pending(report)
        try:
            traced = trace.current()
            wire.send(pack(structs.replace(request, traceparent=traced) if traced else request), fds)
            return await pending.answer
        except Unavailable:
            if wire.peer_gone:  # who reads has not had its turn yet
                self.lost.set()
            raise
        except asyncio.CancelledError:
            if pending.answer.done() and not pending.answer.cancelled() and pending.answer.exception() is None:
                _close_all(pending.answer.result()[1])  # it came in the very turn in which its asker gave up
            raise
        finally:
            del self._pending[request.request]
            if not pending.answer.done() or pending.answer.cancelled():
                with contextlib.suppress(SllmError):
                    wire.send(pack(Cancel(request=request.request)))

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
        fds = wire.fds.take(message.fds) if isinstance(message, Granted | Store | StoreDevice) else []
        if isinstance(message, Store | StoreDevice | Unstore):
            self._keep(wire, message, fds)
            return
        pending = self._pending.get(getattr(message, "request", 0))
        if pending is None or pending.answer.done():
            _close_all(fds)  # of a grant whose asker gave up
        elif isinstance(message, LoadProgress):
            if pending.report is not None:
                pending.report(message.stage, message.done, message.total)
        else:
            pending.answer.set_result((message, fds))

    def _keep(self, wire: AsyncWire, message: Store | StoreDevice | Unstore, fds: Sequence[int]) -> None:
        if self._kept is None:
            _close_all(fds)
            raise ProtocolError("loaderd brings chunks to a client that keeps none")
        if isinstance(message, Unstore):
            self._kept.drop(message.ids)
            return
        if isinstance(message, StoreDevice):
            self._kept.store_device(message, fds)
        else:
            self._kept.store(message, fds)
        with contextlib.suppress(Unavailable):  # then it is about to be gone
            wire.send(pack(Stored(batch=message.batch)))


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _decoded(payload: bytes | None) -> Answer:
    if payload is None:
        raise Unavailable("loaderd closed the connection")
    answer: Answer = unpack(cast(Any, Answer), payload)
    return answer
