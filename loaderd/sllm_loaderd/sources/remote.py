"""Objects of an HTTP server by ranges, over pooled connections: resumed, retried, and refused if they change."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urljoin

from sllm_loaderd.reader import SourceClosed
from sllm_loaderd.sources.attempts import (
    AGAIN,
    GAIN,
    MOVED,
    Attempts,
    RemoteLimits,
    TryAgain,
    refusal,
    retry_after,
)
from sllm_loaderd.sources.connection import Connection, Connections, Head, split_url
from sllm_runtime.protocol.errors import CorruptCheckpoint, ProtocolError, SllmError, Unavailable
from sllm_runtime.protocol.limits import KIB, MIB

Sign = Callable[[str, str, Mapping[str, str], Any], Mapping[str, str]]
"""(method, url, headers, ``Connection.peer``) → headers with what the server wants to see."""
_SLICE: Final = 1 * MIB
_DETAIL: Final = 16 * KIB
_NO_HEAD: Final = (403, 405, 501)
"""Refusals that may be of HEAD alone: an address that was signed for GET, a server that has no other method."""
RENEWED_S: Final = 10.0
"""After other keys were found so long what was refused may have been signed with those of before."""
_KEYS: Final = (400, 401, 403)
"""What keys that are none, or none any more, are answered with: S3 says 400 of a token that has expired."""
_NO_BYTE: Final = 416
"""What a ranged GET of an empty object is answered with."""


@dataclass(slots=True)
class Span:
    """Bytes wanted from ``offset`` on; ``done`` of them are there."""

    view: memoryview
    offset: int
    done: int = 0

    @property
    def at(self) -> int:
        return self.offset + self.done

    @property
    def left(self) -> int:
        return len(self.view) - self.done


class Remote:
    """The server side of one source: connections, signatures, patience. Thread-safe."""

    def __init__(
        self,
        path: str,
        sign: Sign = lambda method, url, headers, to: headers,
        *,
        remedy: str = "check the credentials",
        limits: RemoteLimits | None = None,
        chance: random.Random | None = None,
        direct: bool = False,
        renew: Callable[[], bool] = lambda: False,
    ) -> None:
        """``direct``: also where the environment names a proxy. ``renew``: look for other keys to sign with, where
        those that there are have been refused; whether there are any, since this or a moment ago."""
        self.path = path
        self.remedy = remedy
        self.limits = limits or RemoteLimits()
        self.sign = sign
        self._renew = renew
        self._chance = chance or random.Random()
        self._connections = Connections(self.limits.connect_s, self.limits.stall_s, direct=direct)
        self._closed = threading.Event()

    def close(self) -> None:
        """End what reads and waits; repeatable."""
        self._closed.set()
        self._connections.close()

    def head(self, url: str) -> Head:
        """The head of the object at ``url``, redirects followed. Where HEAD is refused its first byte is asked for."""
        head = self._asked("HEAD", url, _no_body)[0]
        if head.status not in _NO_HEAD:
            return head
        head = self._asked("GET", url, self._no_rest, {"Range": "bytes=0-0"})[0]
        if head.status == _NO_BYTE:  # what else it says is of the text that it sends instead
            return Head(head.status, {"content-length": "0", "etag": head.headers.get("etag", "")})
        total = head.headers.get("content-range", "").rpartition("/")[2] or head.headers.get("content-length", "")
        return Head(head.status, {**head.headers, "content-length": total})

    def get(self, url: str, most: int) -> tuple[Head, bytes]:
        """A small object whole. Raises ``CorruptCheckpoint`` if it has more than ``most`` bytes."""

        def body(connection: Connection, head: Head) -> bytes:
            if head.length is None or head.length > most:
                raise CorruptCheckpoint(f"{url} has {head.length} bytes where at most {most} are expected", field=url)
            data = bytearray(head.length)
            self.fill(connection, Span(memoryview(data), 0), url)
            return bytes(data)

        return self._asked("GET", url, body)

    def persist(self, what: str, attempt: Callable[[], None], progress: Callable[[], int]) -> None:
        """Call ``attempt`` until it returns; ``TryAgain`` repeats it after a while, a bounded number of times."""
        attempts = Attempts(self.limits, self._chance)
        while True:
            before = progress()
            try:
                return attempt()
            except TryAgain as failure:
                delay = attempts.delay(failure, progress() - before)
            if self._closed.wait(delay):
                raise SourceClosed(f"{what}: the source was closed while it was read")

    def exchange(
        self, method: str, url: str, headers: Mapping[str, str], what: str, body: Callable[[Connection, Head], None]
    ) -> None:
        """One request; ``body`` receives what follows the head. Raises ``TryAgain`` for what may pass."""
        origin, target = split_url(url)
        try:
            connection, used = self._connections.take(origin)
        except (OSError, UnicodeError) as error:  # a host that is no name is a UnicodeError
            raise self._cut(what, f"no connection to {origin.host}:{origin.port}: {error}") from error
        try:
            signed = self.sign(method, url, {"Accept-Encoding": "identity", **headers}, connection.peer)
            head = connection.request(method, target, signed)
            body(connection, head)
        except (OSError, ProtocolError) as error:
            self._connections.drop(connection)
            stale = used and isinstance(error, ConnectionError)
            if used:
                self._connections.forget_idle(origin)
            raise self._cut(what, f"{error or type(error).__name__}", stale) from error
        except BaseException:
            self._connections.drop(connection)
            raise
        self._connections.give_back(connection)

    def _cut(self, what: str, why: str, stale: bool = False) -> TryAgain:
        if self._closed.is_set():
            raise SourceClosed(f"{what}: the source was closed while it was read")
        return TryAgain(Unavailable(f"{what}: {why}; check the network and the server"), 0.0 if stale else 0.05)

    def refuse(self, connection: Connection, head: Head, method: str, what: str) -> SllmError | TryAgain:
        """What a status that is no success becomes; takes the answer's text, if it is short."""
        detail = ""
        if method != "HEAD" and head.length is not None and head.length <= _DETAIL:
            data = bytearray(head.length)
            self.fill(connection, Span(memoryview(data), 0), what)
            detail = " ".join(re.sub(rb"<[^>]*>", b" ", bytes(data)).decode(errors="replace").split())[:200]
        elif method != "HEAD":
            connection.reusable = False
        error = refusal(head.status, what, detail, self.remedy)
        if head.status in AGAIN or (head.status in _KEYS and self._renew()):
            return TryAgain(error, retry_after(head.headers.get("retry-after", "")))
        return error

    def fill(self, connection: Connection, span: Span, what: str) -> None:
        """Receive the rest of ``span``. Raises ``ConnectionResetError`` if it is cut, ``TimeoutError`` if it stalls."""
        while span.left:
            end = min(span.done + _SLICE, len(span.view))
            before, begun = span.done, time.monotonic()
            while span.done < end:
                with span.view[span.done : end] as view:
                    count = connection.receive(view)
                if not count:
                    raise ConnectionResetError(f"the answer was cut at byte {span.at}, {span.left} bytes too early")
                span.done += count
                if time.monotonic() - begun >= self.limits.stall_s:
                    if span.done - before < min(GAIN, end - before):
                        raise TimeoutError(f"only {span.done - before} bytes came in {self.limits.stall_s:g} s")
                    break

    def _no_rest(self, connection: Connection, head: Head) -> bytes:
        connection.reusable = False  # what follows may be the whole object
        return b""

    def _asked(
        self,
        method: str,
        url: str,
        take: Callable[[Connection, Head], bytes],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[Head, bytes]:
        """Head and body of a small answer, redirects followed, failures repeated."""
        found: list[tuple[Head, bytes]] = []
        where = [url]

        def body(connection: Connection, head: Head) -> None:
            if head.status in MOVED and len(where) <= self.limits.redirects:
                connection.reusable = connection.reusable and head.length == 0
                where.append(urljoin(where[-1], head.headers.get("location", "")))
            elif not _answers(method, head, ranged="Range" in headers):
                raise self.refuse(connection, head, method, url)
            else:
                found.append((head, take(connection, head)))

        def attempt() -> None:
            while not found:
                self.exchange(method, where[-1], headers, url, body)

        self.persist(url, attempt, lambda: 0)
        return found[0]


def _no_body(connection: Connection, head: Head) -> bytes:
    return b""


def _answers(method: str, head: Head, *, ranged: bool) -> bool:
    """Whether that says what was asked for; ``ranged``: of its first byte, which every object has but an empty one."""
    nothing = head.status == _NO_BYTE and ranged
    return head.status in (200, 206) or nothing or (method == "HEAD" and head.status in _NO_HEAD)
