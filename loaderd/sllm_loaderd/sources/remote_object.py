"""One object of an HTTP server as a ``ByteSource``: read by ranges, resumed, and refused if it has changed."""

from __future__ import annotations

import functools
import re
from typing import Final
from urllib.parse import urljoin

from sllm_loaderd.sources import Entry
from sllm_loaderd.sources.attempts import GAIN, MOVED, TryAgain, changed
from sllm_loaderd.sources.connection import Connection, Head
from sllm_loaderd.sources.remote import Remote, Span
from sllm_runtime.protocol.errors import CorruptCheckpoint, SllmError, Unavailable

_RANGE: Final = re.compile(r"bytes (\d{1,16})-(\d{1,16})/(\d{1,16})")


class RemoteObject:
    """``ByteSource``: one object at ``url``, as ``entry`` describes it. Closing it leaves the ``Remote`` open."""

    def __init__(self, remote: Remote, url: str, entry: Entry, name: str | None = None) -> None:
        self._remote = remote
        self._url = url
        self._at = url
        self._entry = entry
        self.name = name or url
        self.path = remote.path
        self.nbytes = entry.nbytes

    def read(self, view: memoryview, offset: int) -> str:
        """Fill ``view``; torn connections resume where they broke. Raises typed errors naming object and offset."""
        span = Span(view, offset)
        if offset < 0 or offset + len(view) > self.nbytes:
            raise CorruptCheckpoint(
                f"{self.name}: bytes {offset} to {offset + len(view)} are wanted, it has {self.nbytes}", field=self.name
            )
        if span.left:
            failed: set[str] = set()
            self._remote.persist(self._what(span), lambda: self._attempt(span, failed), lambda: span.done)
        return ""

    def close(self) -> None:
        """Nothing is held by one object."""

    def _what(self, span: Span) -> str:
        return f"{self.name} (bytes {span.at} to {span.offset + len(span.view)})"

    def _attempt(self, span: Span, failed: set[str]) -> None:
        """One range request for what is left of ``span``; where the server moves us to is remembered, until it has
        failed twice for it, as ``Attempts`` counts."""
        for hop in range(self._remote.limits.redirects + 1):
            at = self._at
            moved: list[str] = []
            what, before = self._what(span), span.done

            take = functools.partial(self._take, span, what, moved)
            try:
                self._remote.exchange("GET", at, self._headers(span), what, take)
            except TryAgain:
                if span.done - before >= GAIN:
                    failed.discard(at)
                elif at in failed:  # not for one cut alone: who sent us there may be down, or count what it is asked
                    self._at = self._url  # it may send us elsewhere by now
                else:
                    failed.add(at)
                raise
            except SllmError:
                if at == self._url or hop:  # where we have just been sent to
                    self._at = self._url
                    raise
                self._at = self._url  # where we had been sent to is closed to us by now: ask again where to go
                place = at.partition("?")[0]  # the rest may be what opens it
                raise TryAgain(Unavailable(f"{what}: {place} refuses what {self._url} sends us to")) from None
            if not moved:
                return
            self._at = urljoin(at, moved[0])
        raise Unavailable(f"{self._what(span)}: more than {self._remote.limits.redirects} redirects")

    def _headers(self, span: Span) -> dict[str, str]:
        headers = {"Range": f"bytes={span.at}-{span.offset + len(span.view) - 1}"}
        if self._entry.etag and not self._entry.etag.startswith("W/"):  # a weak tag never matches
            headers["If-Match"] = f'"{self._entry.etag}"'
        return headers

    def _take(self, span: Span, what: str, moved: list[str], connection: Connection, head: Head) -> None:
        if head.status in MOVED:
            connection.reusable = connection.reusable and head.length == 0
            moved.append(head.headers.get("location", ""))
            return
        if head.status not in (200, 206):
            raise self._remote.refuse(connection, head, "GET", what)
        self._check(head, span, what)
        self._remote.fill(connection, span, what)

    def _check(self, head: Head, span: Span, what: str) -> None:
        """The answer has just the bytes asked for, of the object that was registered.

        Some stores answer ranges with 200, some do not know If-Match: what counts is what they say they send.
        """
        etag = entity_tag(head)
        if self._entry.etag and etag and etag != self._entry.etag:
            raise changed(what, f"its entity tag is {etag}, not {self._entry.etag}")
        said = head.headers.get("content-range")
        if said is None and span.at == 0 and span.left == self.nbytes:
            said = f"bytes 0-{self.nbytes - 1}/{head.length}"
        match = _RANGE.fullmatch(said or "")
        if match is None:
            raise Unavailable(f"{what}: the server answered {head.status} without this range ({said}); it has to serve"
                              " range requests")  # fmt: skip
        first, last, total = (int(number) for number in match.groups())
        if total != self.nbytes:
            raise changed(what, f"it has {total} bytes, not {self.nbytes}")
        if (first, last + 1) != (span.at, span.offset + len(span.view)) or head.length != last + 1 - first:
            raise Unavailable(
                f"{what}: the server sends {said} with {head.length} bytes, other than what was asked for"
            )


def entity_tag(head: Head) -> str:
    """The entity tag without its quotes; a weak one keeps its mark."""
    text = head.headers.get("etag", "")
    return text if text.startswith("W/") else text.strip('"')
