"""SSE responses that are no calls: a deployment's progress, logs, events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

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
    ) -> None:
        """One response. Errors of ``source`` before the first piece (or ``headers_wait``) are raised, later written as
        ``failed`` says."""
        gone = self._tasks.start(_gone(receive), "caller")
        step: Step | None = None
        begun = False
        try:
            while True:
                step = step or self._tasks.start(_next(source), "next event")
                wait = self._heartbeat if begun else self._headers_wait
                await asyncio.wait({step, gone}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return
                piece, last = self._piece(step, begun, failed)
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": [*SSE_HEADERS, *headers]})
                    begun = True
                if not await self._send(piece, send, last=last) or last:
                    return
                step = None if step.done() else step
        finally:
            gone.cancel()
            if step is not None:
                step.cancel()
                await asyncio.wait({step})
            await source.aclose()

    @staticmethod
    def _piece(step: Step, begun: bool, failed: Callable[[SllmError], bytes]) -> tuple[bytes, bool]:
        """What to write now, and whether it is the last."""
        if not step.done():
            return (sse.HEARTBEAT if begun else b""), False
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


async def _next(source: Source) -> bytes | SllmError | None:
    """The next piece; an error that is the source's answer is returned: raised, it would count as a task's failure."""
    try:
        return await anext(source, None)
    except SllmError as error:
        return error


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
