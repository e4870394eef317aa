"""Responses that are no calls of their own: a deployment's progress, logs, events, the answers of kept calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final

import msgspec

from sllm_gateway import sse
from sllm_gateway.asgi import PIECE, Headers, Message, Scope, Send
from sllm_gateway.server import CLOSE_AFTER_S, Connection
from sllm_runtime.platform.owned import Tasks, end
from sllm_runtime.protocol.errors import SllmError, SlowConsumer
from sllm_runtime.protocol.http import error_view

SSE_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]
Source = AsyncGenerator[bytes, None]
Step = asyncio.Task[bytes | SllmError | None]
Quiet = Callable[[], Awaitable[bytes | None]]
"""What there is to say while nothing comes: empty: a heartbeat will do; None: nothing may be written now. Raises
nothing."""
QUIET_S: Final = 1.0
"""It is asked this often."""


class EventWriter:
    """Writes what ``source`` yields, heartbeats between, and ``[DONE]`` at its end. Owner of the tasks it needs.

    A client that takes nothing for ``slow`` seconds gets an error, and is cut off where it does not take that either.
    """

    def __init__(self, tasks: Tasks, *, headers_wait: float, heartbeat: float, slow: float) -> None:
        self._tasks = tasks
        self._headers_wait = headers_wait
        self._heartbeat = heartbeat
        self._slow = slow

    async def write(
        self,
        source: Source,
        scope: Scope,
        send: Send,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        failed: Callable[[SllmError], bytes] = lambda error: sse.event(
            msgspec.json.encode(error_view(error.body(), None)), name="error"
        ),
        quiet: Quiet | None = None,
    ) -> None:
        """One response. Errors of ``source`` before the first piece (or ``headers_wait``) are raised, later written as
        ``failed`` says. ``quiet`` is asked what to say while nothing comes."""
        connection: Connection = scope["state"]["connection"]
        gone = asyncio.get_running_loop().create_future()
        pause = _Pause(self._heartbeat, quiet)
        step: Step | None = None
        saying: asyncio.Task[bytes] | None = None
        begun = False
        try:
            with connection.watched(lambda: gone.set_result(None)):
                while True:
                    step = step or self._tasks.start(_next(source), "next event")
                    if begun:
                        saying = saying or self._tasks.start(pause.says(), "pause")
                    awaited = {step, gone, saying} if saying is not None else {step, gone}
                    wait = None if begun else self._headers_wait
                    await asyncio.wait(awaited, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                    if gone.done():
                        return
                    piece, last = b"", False
                    if saying is not None and saying.done():
                        piece, saying = saying.result(), None
                    if step.done():  # what was to be said before is no longer so
                        (piece, last), step = self._piece(step, begun, failed), None
                    if not begun:
                        await self._begin([*SSE_HEADERS, *headers], send, connection)
                        begun = True
                        last = last or scope["method"] == "HEAD"  # which wants no more, and would wait for it for ever
                    if not await self._goes_on(piece, last, failed, send, connection):
                        return
                    pause.wrote()
        finally:
            await end(task for task in (step, saying) if task is not None)
            await source.aclose()

    @staticmethod
    def _piece(step: Step, begun: bool, failed: Callable[[SllmError], bytes]) -> tuple[bytes, bool]:
        """What came, and whether it is the last."""
        piece = step.result()
        if isinstance(piece, SllmError):
            if not begun:
                raise piece
            return failed(piece), True
        return (sse.DONE, True) if piece is None else (piece, False)

    async def _goes_on(
        self, piece: bytes, last: bool, failed: Callable[[SllmError], bytes], send: Send, connection: Connection
    ) -> bool:
        """Write it; whether there is more to write."""
        if await self._send(piece, send, connection, more=not last):
            return not last
        if not last:
            error = SlowConsumer(f"the reader took nothing for {self._slow:g} s; read faster")
            await self._send(failed(error), send, connection, more=False)
        connection.abort_after(CLOSE_AFTER_S)
        return False

    async def whole(self, scope: Scope, send: Send, headers: Headers, body: bytes) -> None:
        """A response in one piece, however large: who takes nothing of it is cut off as from events."""
        connection: Connection = scope["state"]["connection"]
        await self._begin([*headers, (b"content-length", b"%d" % len(body))], send, connection)
        if not await self._send(body, send, connection, more=False):
            connection.abort_after(CLOSE_AFTER_S)

    async def _begin(self, headers: Headers, send: Send, connection: Connection) -> None:
        await self._put({"type": "http.response.start", "status": 200, "headers": headers}, send, connection)

    async def _send(self, data: bytes, send: Send, connection: Connection, *, more: bool) -> bool:
        """Whether the client took it in time; what is begun is written whole all the same, since more may follow it."""
        in_time = True
        for start in range(0, max(1, len(data)), PIECE):
            piece = data if len(data) <= PIECE else data[start : start + PIECE]
            message = {"type": "http.response.body", "body": piece, "more_body": more or start + PIECE < len(data)}
            in_time = await self._put(message, send, connection) and in_time
        return in_time

    async def _put(self, message: Message, send: Send, connection: Connection) -> bool:
        """Whether the client took what was before it in time; else it goes to the buffer, however full that is."""
        try:
            async with asyncio.timeout(self._slow):
                await send(message)
        except TimeoutError:  # it waited, so nothing of it is written
            connection.unblock()
            await send(message)
            return False
        return True


class _Pause:
    """When something is to be said though nothing came: what ``quiet`` has to say, else a heartbeat every ``heartbeat``
    seconds."""

    def __init__(self, heartbeat: float, quiet: Quiet | None) -> None:
        self._heartbeat, self._quiet = heartbeat, quiet
        self._clock = asyncio.get_running_loop().time
        self._wrote = self._clock()

    def wrote(self) -> None:
        self._wrote = self._clock()

    async def says(self) -> bytes:
        """That, once it is to be said."""
        asked = self._wrote
        while True:
            due = self._wrote + self._heartbeat
            wake = due if self._quiet is None else min(due, max(self._wrote, asked) + QUIET_S)
            if (left := wake - self._clock()) > 0:
                await asyncio.sleep(left)
                continue
            said: bytes | None = b""
            if self._quiet is not None:
                asked, said = self._clock(), await self._quiet()
            if said and self._wrote <= asked:  # else it is from before what came meanwhile
                return said
            if said is None:
                await asyncio.sleep(QUIET_S)
            elif self._clock() >= self._wrote + self._heartbeat:
                return sse.HEARTBEAT


async def _next(source: Source) -> bytes | SllmError | None:
    """The next piece; an error that is the source's answer is returned: raised, it would count as a task's failure."""
    try:
        return await anext(source, None)
    except SllmError as error:
        return error
