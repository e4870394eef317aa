"""``/api/v1/functions/{name}/logs`` and ``/api/v1/events``: what was written and what happened, as SSE."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from sllm_gateway import sse, views
from sllm_gateway.asgi import Receive, Scope, Send
from sllm_gateway.controller import Controller
from sllm_gateway.errors import quoted
from sllm_gateway.events import EventWriter, Source
from sllm_gateway.follow import messages
from sllm_gateway.routes.api import last_event_id, name_of
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import codec, subjects
from sllm_runtime.protocol.errors import InvalidRequest, ProtocolError
from sllm_runtime.protocol.events import KINDS, Event, LogRecord
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.manifest import NAME

MOST_LINES = 10_000
LATEST = 2.0**33
"""Of a Unix time that a query may give: some centuries from now, and nothing that a date cannot hold."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,80}")
Render = Callable[[int, bytes], bytes | None]
"""One message, by its number and data, as an SSE event; None: it is not wanted."""


class Logs:
    """Lines and events are kept in bounded streams, also after the instance that wrote them has gone."""

    def __init__(self, bus: Bus, controller: Controller, writer: EventWriter) -> None:
        self._bus = bus
        self._controller = controller
        self._writer = writer

    def routes(self) -> list[BaseRoute]:
        return [
            Route(f"{API}/functions/{{name}}/logs", _Endpoint(self.logs), methods=["GET"]),
            Route(f"{API}/events", _Endpoint(self.events), methods=["GET"]),
        ]

    async def logs(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        name, call = name_of(request), request.query_params.get("call")
        query = _Query.of(request)
        source = _tail(self._bus, subjects.LOGS_STREAM, subjects.logs_of(name), query, _log_render(call))
        if not (query.follow or query.after):
            source = self._must_exist(source, name)
        await self._writer.write(source, scope, send)

    async def _must_exist(self, source: Source, name: str) -> Source:
        """A function that has no line and is not there either is a mistake in its name."""
        empty = True
        async with aclosing(source):
            async for piece in source:
                empty = False
                yield piece
        if empty:
            await self._controller.function(name)

    async def events(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        about = _About.of(request.query_params)
        query = _Query.of(request)
        wanted = subjects.events_of(about.kind, about.function, about.call)
        source = _tail(self._bus, subjects.EVENTS_STREAM, wanted, query, _event_render(about))
        await self._writer.write(source, scope, send)


class _Endpoint:
    """Makes starlette take a bound method for an ASGI application."""

    def __init__(self, run: Callable[[Scope, Receive, Send], object]) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)  # type: ignore[misc]


class _Query(msgspec.Struct, frozen=True):
    limit: int = 1000
    follow: bool = False
    since: float | None = None
    after: int = 0
    """The number of the last that came to who reads on: each behind it is wanted, whatever their number."""

    @classmethod
    def of(cls, request: Request) -> _Query:
        """Raises ``InvalidRequest`` that names the parameter."""
        query = request.query_params
        given: dict[str, str | int] = {key: query[key] for key in ("limit", "follow", "since") if query.get(key)}
        given["after"] = last_event_id(request) or 0
        try:
            found = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"query: {error}", field=str(error).rpartition("$.")[2].rstrip("`")) from error
        if not 0 <= found.limit <= MOST_LINES:
            raise InvalidRequest(f"limit must be between 0 and {MOST_LINES}", field="limit")
        if found.since is not None and not abs(found.since) <= LATEST:
            raise InvalidRequest("since must be a Unix time in seconds", field="since")
        return found


def _log_render(call: str | None) -> Render:
    def render(number: int, data: bytes) -> bytes | None:
        record = codec.unpack(LogRecord, data)
        if call is not None and record.call != call:
            return None
        return sse.event(views.log_line(record).model_dump_json().encode(), id=number)

    return render


class _About(msgspec.Struct, frozen=True):
    """What the events are of; empty: of anything. ``kind``: one, or the first word of several."""

    kind: str = ""
    function: str = ""
    call: str = ""

    @classmethod
    def of(cls, query: Mapping[str, str]) -> _About:
        """Raises ``InvalidRequest`` that names the parameter."""
        found = cls(*(query.get(key, "") for key in cls.__struct_fields__))
        if found.kind and found.kind not in KINDS:
            raise InvalidRequest(f"no event is of kind {quoted(found.kind)}: {', '.join(sorted(KINDS))}", field="kind")
        for key, pattern in (("function", NAME), ("call", _ID)):
            given = getattr(found, key)
            if given and not pattern.fullmatch(given):
                raise InvalidRequest(f"{key} cannot be {quoted(given)}", field=key)
        return found

    def holds(self, event: Event) -> bool:
        """Whether ``event`` is meant."""
        kind = self.kind in ("", event.kind, event.kind.partition(".")[0])
        return kind and self.function in ("", event.function) and self.call in ("", event.call)


def _event_render(about: _About) -> Render:
    def render(number: int, data: bytes) -> bytes | None:
        event = codec.unpack(Event, data)
        if not about.holds(event):
            return None
        return sse.event(msgspec.json.encode(event), id=number, name="event")

    return render


async def _tail(
    bus: Bus, stream: str, subject: str | Sequence[str], query: _Query, render: Render
) -> AsyncGenerator[bytes, None]:
    """The last ``limit`` that are there now, or each behind the last that came to who reads on; with ``follow`` then
    where that is, and each that comes."""
    kept: deque[bytes] = deque(maxlen=query.limit)
    past = not query.after
    newest = query.limit if subject == subjects.events_of() and query.since is None and past else None
    reading = messages(bus, stream, subject, query.since, newest=newest, after=query.after, placed=query.follow)
    async with aclosing(reading) as found:
        async for message in found:
            if message.data is None:
                past = False
                if kept:
                    yield b"".join(kept)
                if not query.follow:
                    return
                yield sse.place(message.number)
                continue
            try:
                event = render(message.number, message.data)
            except ProtocolError:
                continue  # of a writer that this release does not understand
            if event is not None and past:
                kept.append(event)
            elif event is not None:
                yield event
