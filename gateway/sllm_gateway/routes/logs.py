"""``/api/v1/functions/{name}/logs`` and ``/api/v1/events``: what was written and what happened, as SSE."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec
from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from sllm_gateway import sse, views
from sllm_gateway.asgi import Receive, Scope, Send
from sllm_gateway.controller import Controller
from sllm_gateway.errors import quoted
from sllm_gateway.events import EventWriter, Source
from sllm_gateway.follow import Message, messages
from sllm_gateway.routes.api import last_event_id, name_of
from sllm_gateway.written import event_of, line_of
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import InvalidRequest, ProtocolError
from sllm_runtime.protocol.events import KINDS, Event, LogRecord
from sllm_runtime.protocol.http import API, CALL_PART, MOST_LINES, SOME_LINES
from sllm_runtime.protocol.manifest import NAME

LATEST = 2.0**33
"""Of a Unix time that a query may give: some centuries from now, and nothing that a date cannot hold."""
BACK = 8
"""Who wants the last of some of a stream's messages reads so many times as many when what was read had too few."""
AT_FIRST = 256
"""Messages of a stream that are read at first for some of them."""
T = TypeVar("T")


@dataclass(frozen=True)
class _Kept(Generic[T]):
    """What a stream keeps. It takes far longer to show one than to read it."""

    read: Callable[[Message], T | None]
    """None: it is not wanted. Raises ``ProtocolError``."""
    show: Callable[[int, T], bytes]
    """As an SSE event of that number."""


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
        source = _tail(self._bus, subjects.LOGS_STREAM, subjects.logs_of(name), query, _lines(call))
        if not query.follow and query.after is None:
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
        source = _tail(self._bus, subjects.EVENTS_STREAM, wanted, query, _events(about))
        await self._writer.write(source, scope, send)


class _Endpoint:
    """Makes starlette take a bound method for an ASGI application."""

    def __init__(self, run: Callable[[Scope, Receive, Send], object]) -> None:
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)  # type: ignore[misc]


class _Query(msgspec.Struct, frozen=True):
    limit: int = SOME_LINES
    follow: bool = False
    since: float | None = None
    ago: float | None = None
    """Of the last so many seconds, by this gateway's clock: the caller's may be another. Goes before ``since``, which
    is for gateways that do not know it."""
    after: int | None = None
    """The number of the last that came to who reads on: each behind it is wanted, whatever their number."""

    @classmethod
    def of(cls, request: Request) -> _Query:
        """Raises ``InvalidRequest`` that names the parameter."""
        query = request.query_params
        keys = ("limit", "follow", "since", "ago")
        given: dict[str, str | int | None] = {key: query[key] for key in keys if query.get(key)}
        given["after"] = last_event_id(request)
        try:
            found = msgspec.convert(given, cls, strict=False)
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"query: {error}", field=str(error).rpartition("$.")[2].rstrip("`")) from error
        if not 0 <= found.limit <= MOST_LINES:
            raise InvalidRequest(f"limit must be between 0 and {MOST_LINES}", field="limit")
        if found.since is not None and not abs(found.since) <= LATEST:
            raise InvalidRequest("since must be a Unix time in seconds", field="since")
        if found.ago is None:
            return found
        if not 0 <= found.ago <= LATEST:
            raise InvalidRequest("ago must be seconds before now", field="ago")
        return msgspec.structs.replace(found, since=max(0.0, time.time() - found.ago))


def _lines(call: str | None) -> _Kept[LogRecord]:
    def read(message: Message) -> LogRecord | None:
        line = line_of(message)
        return line if call in (None, line.call) else None

    return _Kept(read, lambda number, line: sse.event(views.log_line(line).model_dump_json().encode(), id=number))


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
        for key, pattern in (("function", NAME), ("call", CALL_PART)):
            given = getattr(found, key)
            if given and not re.fullmatch(pattern, given):
                raise InvalidRequest(f"{key} cannot be {quoted(given)}", field=key)
        return found

    def holds(self, event: Event) -> bool:
        """Whether ``event`` is meant."""
        kind = self.kind in ("", event.kind, event.kind.partition(".")[0])
        return kind and self.function in ("", event.function) and self.call in ("", event.call)


def _events(about: _About) -> _Kept[Event]:
    def read(message: Message) -> Event | None:
        event = event_of(message)
        return event if about.holds(event) else None

    return _Kept(read, lambda number, event: sse.event(msgspec.json.encode(event), id=number, name="event"))


async def _tail(
    bus: Bus, stream: str, subject: str | Sequence[str], query: _Query, kept: _Kept[T]
) -> AsyncGenerator[bytes, None]:
    """The last ``limit`` that are there now, or each behind the last that came to who reads on; with ``follow`` then
    where that is, and each that comes."""
    newest = None
    if query.after is None and query.since is None:
        newest = query.limit if subject == subjects.events_of() else max(query.limit, AT_FIRST)
    while True:
        since = query.since if query.after is None else None
        reading = messages(bus, stream, subject, since, newest=newest, after=query.after or 0, placed=query.follow)
        async with aclosing(reading) as found:
            if query.after is None:
                last, there = await _last(found, query.limit, kept)
                if newest is not None and len(last) < query.limit and not there.whole:
                    newest *= BACK
                    continue
                if last:
                    yield b"".join(kept.show(*each) for each in last)
                if not query.follow:
                    return
                yield sse.place(there.number)
            async for message in found:
                if message.data is None and not query.follow:
                    return
                if (piece := _shown(message, kept)) is not None:
                    yield piece


async def _last(
    found: AsyncGenerator[Message, None], limit: int, kept: _Kept[T]
) -> tuple[deque[tuple[int, T]], Message]:
    """The last of what is there, and where that is."""
    last: deque[tuple[int, T]] = deque(maxlen=limit)
    while (message := await anext(found)).data is not None:
        if (one := _wanted(message, kept)) is not None:
            last.append((message.number, one))
    return last, message


def _shown(message: Message, kept: _Kept[T]) -> bytes | None:
    if message.data is None:
        return sse.place(message.number)
    one = _wanted(message, kept)
    return kept.show(message.number, one) if one is not None else None


def _wanted(message: Message, kept: _Kept[T]) -> T | None:
    try:
        return kept.read(message)
    except ProtocolError:  # of a writer that this release does not understand
        return None
