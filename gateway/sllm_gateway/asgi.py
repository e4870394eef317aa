"""The few pieces of plain ASGI that the hot path needs: reading a bounded body, answering, writing in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, Final

from sllm_gateway.bodies import Share
from sllm_runtime.protocol.errors import BodyTimeout, BodyTooLarge, Cancelled, InvalidRequest
from sllm_runtime.protocol.http import EXACT

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Coroutine[Any, Any, None]]
Headers = list[tuple[bytes, bytes]]
JSON: Final = (b"content-type", b"application/json")
"""The header of every answer in JSON."""

SHARE = "sllm.share"
"""Where a request's scope has its ``Share`` of what all bodies take."""
STATE = "sllm.tracestate"
"""Where it has the ``tracestate`` that goes on beside its trace."""
PIECE = 64 * 1024
"""Largest write: a slow client is noticed by the write that does not end, so writes must be small."""
_CODINGS: Final = frozenset((b"gzip", b"x-gzip", b"deflate", b"br", b"zstd", b"compress", b"x-compress"))
"""What is no coding (`utf-8`, as many clients say) changes nothing of the body."""
LINGER_S = 2.0
LINGER_BYTES = 64 * 2**20


def header(scope: Scope, name: bytes) -> bytes | None:
    """The first header of that (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            found: bytes = value
            return found
    return None


def joined(scope: Scope, name: bytes) -> bytes:
    """All headers of that (lower-case) name, as one."""
    return b",".join(value for key, value in scope["headers"] if key == name)


def declared_length(scope: Scope) -> int | None:
    """Content-Length, if there is one. Raises ``InvalidRequest``."""
    text = header(scope, b"content-length")
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidRequest("Content-Length is no number")
    return int(text)


async def read_body(scope: Scope, receive: Receive, limit: int, within_s: float) -> bytes:
    """The request's body. Raises ``BodyTooLarge`` before it reads a body that says so itself, else as soon as it is;
    ``BodyTimeout`` if all of it is not here after ``within_s``; ``QueueFull`` if all bodies together take too much;
    ``Cancelled`` if the client goes away; ``InvalidRequest`` if it is compressed."""
    length = declared_length(scope)
    if length is not None and length > limit:
        raise _too_large(limit)
    try:
        async with asyncio.timeout(within_s):
            body = await _read_all(receive, limit, scope[SHARE])
    except TimeoutError:
        raise BodyTimeout(f"the body was not here after {within_s:g} s; send it faster, or send less") from None
    coding = header(scope, b"content-encoding")
    if coding and not _CODINGS.isdisjoint(each.strip() for each in coding.lower().split(b",")):
        # Only now: who reads no answer before all is sent would be reset, were the connection closed before.
        raise InvalidRequest(
            "a body with a Content-Encoding is not read here; send it uncompressed, without that header"
        )
    return body


async def _read_all(receive: Receive, limit: int, share: Share) -> bytes:
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Cancelled("the caller went away while it sent the body")
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        share.take(len(part))
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {limit} bytes; send less, or a reference to the data")


def send_now(send: Send, message: Message) -> None:
    """``send`` to a client whose connection is writable: then it never waits, and one step ends it."""
    sending = send(message)
    try:
        sending.send(None)
    except StopIteration:
        return
    raise RuntimeError("a writable connection made its sender wait")


def exactness(*, exact: bool) -> Headers:
    """What an answer's headers say of whether the same tokens would come again."""
    return [] if exact else [(EXACT.lower().encode(), b"false")]


async def answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A whole small response."""
    headers = [*headers, (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def refuse_body(receive: Receive, send: Send, status: int, headers: Headers, body: bytes) -> None:
    """Answer a request whose body was not read, so that the client sees the answer: were the connection closed while
    it still sends, the reset would overtake it. So what comes is thrown away for a moment."""
    headers = [*headers, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": True})
    left = LINGER_BYTES
    try:
        async with asyncio.timeout(LINGER_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    break
    except TimeoutError:
        pass
    await send({"type": "http.response.body", "body": b""})
