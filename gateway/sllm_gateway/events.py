"""SSE responses that are no calls: a deployment's progress, logs, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from typing import Final

import msgspec

from sllm_gateway import sse
from sllm_gateway.asgi import PIECE, Headers, Receive, Send
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.errors import SllmError
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
    """Writes what ``source`` yields, heartbeats between, and ``[DONE]`` at its end. Owner of the tasks it needs."""

    def __init__(self, tasks: Tasks, *, headers_wait: float, heartbeat: float, slow: float) -> None:
        self._tasks = tasks
        self._headers_wait = headers_wait
        self._heartbeat = heartbeat
        self._slow = slow

    async def write(
        self,
        source: Source,
        receive: Receive,
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
        gone = self._tasks.start(_gone(receive), "caller")
        pause = _Pause(self._heartbeat, quiet)
        step: Step | None = None
        saying: asyncio.Task[bytes] | None = None
        begun = False
        try:
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
                    await send({"type": "http.response.start", "status": 200, "headers": [*SSE_HEADERS, *headers]})
                    begun = True
                if not await self._send(piece, send, last=last) or last:
                    return
                pause.wrote()
        finally:
            gone.cancel()
            left = {task for task in (step, saying) if task is not None}
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
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

    async def _send(self, piece: bytes, send: Send, *, last: bool) -> bool:
        """Whether the client took it in time."""
        try:
            async with asyncio.timeout(self._slow):
                for start in range(0, max(1, len(piece)), PIECE):
                    more = not last or start + PIECE < len(piece)
                    await send({"type": "http.response.body", "body": piece[start : start + PIECE], "more_body": more})
        except TimeoutError:
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


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
