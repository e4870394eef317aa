"""Writes a call's answer: plain ASGI, one send for everything that is there, no task or queue per token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sllm_gateway import sse, timing
from sllm_gateway.asgi import JSON, PIECE, Headers, Message, Scope, Send, exactness, send_now
from sllm_gateway.binding import NEVER
from sllm_gateway.call import Call
from sllm_gateway.calls import Calls
from sllm_gateway.outputs import Body, Stream
from sllm_gateway.server import CLOSE_AFTER_S, Connection
from sllm_gateway.settings import GatewaySettings
from sllm_gateway.starts import PROGRESS_EVERY_S
from sllm_runtime.protocol.errors import Cancelled, InternalError, SllmError, SlowConsumer
from sllm_runtime.protocol.frames import End
from sllm_runtime.protocol.http import CALL_ID, SERVER_TIMING
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.timeline import comment, server_timing

_SSE: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
]


class Responder:
    """Answers with what a call brings. Errors before the headers are raised; later ones are written."""

    def __init__(self, calls: Calls, settings: GatewaySettings, clock: Callable[[], float]) -> None:
        self._calls = calls
        self._settings = settings
        self._clock = clock

    async def stream(self, call: Call, encoder: Stream, scope: Scope, send: Send) -> None:
        """As SSE. Headers wait for the first frame, the end, or ``headers_wait``."""
        connection: Connection = scope["state"]["connection"]
        with self._watched(call, connection):
            limit = call.order.accepted + self._settings.headers_wait
            while not call.frames and not call.over and self._clock() < limit:
                await call.changed(limit)
            if call.error is not None and not call.frames:
                raise call.error
            headers = [*_SSE, *_head(call)]
            await self._put(call, {"type": "http.response.start", "status": 200, "headers": headers}, send)
            await self._write_all(call, encoder, scope, send, connection)
            if isinstance(call.error, SlowConsumer):
                connection.abort_after(CLOSE_AFTER_S)

    async def _write_all(self, call: Call, encoder: Stream, scope: Scope, send: Send, connection: Connection) -> None:
        pause = _Pause(self._clock(), self._settings.heartbeat)
        call.paces = True
        write_now = self._write_now(call, encoder, _chunks(scope, send, connection), connection, pause)
        while True:
            cost = call.buffered
            try:
                data = _taken(call, encoder, self._clock())
            except SllmError as error:  # no right worker sends such a frame
                data = b""
                self._calls.fail(call, error)
                call.error = call.error or error  # also of one that had ended well
            over = call.over
            if over:
                data += self._closing(call, encoder)
            elif not data and not encoder.inside:
                data = pause.says(self._calls.waits(call), encoder, self._clock())
            if data or over:
                await self._write(call, data, send, more=not over)
                pause.wrote(self._clock())
            if cost:
                self._calls.consumed(call, cost, self._clock())
            if over:
                return
            if not call.frames and not call.over:
                call.write_now = write_now
                self._calls.written(call)
                try:
                    await call.changed(pause.due)
                finally:
                    call.write_now = None

    def _write_now(
        self, call: Call, encoder: Stream, chunk: Callable[[bytes], None], connection: Connection, pause: _Pause
    ) -> Callable[[float], bool]:
        """What writes new frames while the reader waits for them; a client that lags is for the reader to wait for."""

        def write(now: float) -> bool:
            cost = call.buffered
            reserve = sum(frame.cost for frame in call.held) if call.pace is not None else 0
            if call.over or cost + reserve > PIECE or not connection.writable:
                return False
            if data := _taken(call, encoder, now):
                chunk(data)
                pause.wrote(now)
            if cost:
                self._calls.consumed(call, cost, now)
            return True

        return write

    def _closing(self, call: Call, encoder: Stream) -> bytes:
        """What ends the stream. A caller that has gone does not read it: a call may also be cancelled by others."""
        if call.error is not None:
            return encoder.error(call.error)
        timeline = sse.comment(comment(timing.spans(call)))
        return encoder.end(call.end or End()) + timeline + sse.DONE

    async def _write(self, call: Call, data: bytes, send: Send, *, more: bool) -> None:
        for start in range(0, max(1, len(data)), PIECE):
            piece = data if len(data) <= PIECE else data[start : start + PIECE]
            more_body = more or start + PIECE < len(data)
            await self._put(call, {"type": "http.response.body", "body": piece, "more_body": more_body}, send)

    async def _put(self, call: Call, message: Message, send: Send) -> None:
        """Also the head may wait: for a client that has not taken the answer before."""
        call.writing = self._clock()
        call.due = min(call.due, call.writing + self._settings.slow_consumer)
        await send(message)
        call.writing = None

    async def whole(self, call: Call, encoder: Body, scope: Scope, send: Send) -> None:
        """As one JSON body, when all of it is there."""
        connection: Connection = scope["state"]["connection"]
        with self._watched(call, connection):
            while not call.over:
                await call.changed(NEVER)
            if call.error is not None:
                raise call.error
            if call.end is None:
                raise InternalError("the call ended without an end")
            if not call.exact:
                encoder.inexact()
            body = encoder.body(call.take(), call.end)
            headers = [JSON, *_head(call)]
            headers.append((b"content-length", b"%d" % len(body)))
            await self._put(call, {"type": "http.response.start", "status": 200, "headers": headers}, send)
            await self._write(call, body, send, more=False)
            if isinstance(call.error, SlowConsumer):
                connection.abort_after(CLOSE_AFTER_S)

    @contextmanager
    def _watched(self, call: Call, connection: Connection) -> Iterator[None]:
        """While the answer is written: the call's work is cancelled at once when its caller goes away."""

        def gone() -> None:
            self._calls.fail(call, Cancelled("the caller went away"))

        call.unblock = connection.unblock
        try:
            with connection.watched(gone):
                yield
        finally:
            self._calls.leave(call)


def _chunks(scope: Scope, send: Send, connection: Connection) -> Callable[[bytes], None]:
    def send_chunk(data: bytes) -> None:
        send_now(send, {"type": "http.response.body", "body": data, "more_body": True})

    return connection.chunks(scope) or send_chunk


class _Pause:
    """What a stream says while no frame comes: progress when it has changed, else a heartbeat."""

    def __init__(self, now: float, heartbeat: float) -> None:
        self._heartbeat = heartbeat
        self._shown: Progress | None = None
        self._next_progress = now
        self.due = now + heartbeat
        """When to ask again at the latest."""

    def wrote(self, now: float) -> None:
        self.due = now + self._heartbeat

    def says(self, progress: Progress | None, encoder: Stream, now: float) -> bytes:
        """What to write now, if anything."""
        if progress is not None and progress != self._shown:
            if now < self._next_progress:
                self.due = self._next_progress
                return b""
            self._shown, self._next_progress = progress, now + PROGRESS_EVERY_S
            return encoder.progress(progress)
        return sse.HEARTBEAT if now >= self.due else b""


def _taken(call: Call, encoder: Stream, now: float) -> bytes:
    """What is here and due, encoded. Which instance it is from is known with the first frame at the latest."""
    if not call.exact:
        encoder.inexact()
    return encoder.frames(call.take_due(now))


def _head(call: Call) -> Headers:
    return [
        (CALL_ID.lower().encode(), call.id.encode()),
        (SERVER_TIMING.lower().encode(), server_timing(timing.spans(call)).encode()),
        *exactness(exact=call.exact),
    ]
