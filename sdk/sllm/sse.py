"""Server-sent events, sans-I/O: bytes in, events out (WHATWG's rules, the parts that docs/http.md uses)."""

from __future__ import annotations

import codecs
from dataclasses import dataclass


@dataclass(frozen=True)
class Event:
    """One event. ``comment`` holds the text of a comment line, which comes as an event of its own; so does an ``id``
    without data, which says where the stream stands (``comment`` is empty then)."""

    data: str = ""
    event: str = "message"
    id: str | None = None
    comment: str | None = None

    @property
    def done(self) -> bool:
        """Whether this is the stream's regular end."""
        return self.comment is None and self.data == "[DONE]"


class Parser:
    """Feed chunks as they come, cut anywhere."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
        self._line: list[str] = []
        self._cr = False
        self._data: list[str] = []
        self._event = ""
        self._id: str | None = None

    def feed(self, chunk: bytes) -> list[Event]:
        """Events and comments that are complete now."""
        text = self._decoder.decode(chunk)
        if self._cr and text:
            self._cr = False
            text = text.removeprefix("\n")
        if not text:
            return []
        self._cr = text.endswith("\r")
        *complete, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
        events: list[Event] = []
        for line in complete:
            # Pieces of a line are joined once, at its end: an output may have 32 MiB.
            self._take("".join((*self._line, line)), events)
            self._line.clear()
        if rest:
            self._line.append(rest)
        return events

    def _take(self, line: str, events: list[Event]) -> None:
        if line.startswith(":"):
            events.append(Event(comment=line[1:].removeprefix(" ")))
        elif not line:
            if self._data:
                events.append(Event("\n".join(self._data), self._event or "message", self._id))
            elif self._id is not None:
                events.append(Event(id=self._id, comment=""))
            self._data, self._event, self._id = [], "", None
        else:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self._data.append(value)
            elif field == "event":
                self._event = value
            elif field == "id":
                self._id = value
