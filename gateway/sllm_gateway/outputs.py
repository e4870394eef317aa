"""What a caller gets of a function's frames: events, or one JSON value. The bytes are the function's own."""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from sllm_gateway import sse
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.frames import End, Frame, FrameKind
from sllm_runtime.protocol.http import error_view
from sllm_runtime.protocol.node import Progress

_OUTPUT: Final = FrameKind.OUTPUT  # an enum's member is found through its class: for every token that counts
_LF, _CR = b"\n\r"


class Stream(Protocol):
    """Encodes one streamed answer."""

    def frames(self, frames: list[Frame]) -> bytes:
        """The events of these frames."""

    def inexact(self) -> None:
        """What follows says that the same tokens are not promised to come again. Repeatable."""

    def end(self, end: End) -> bytes:
        """What follows the last frame of an answer that succeeded, before the timeline."""

    def error(self, error: SllmError) -> bytes:
        """The last event of an answer that failed in mid-stream."""

    def progress(self, progress: Progress) -> bytes:
        """How far the start is that the caller waits for."""

    @property
    def inside(self) -> bool:
        """Whether the last event is not complete: nothing else can be written now."""


class Body(Protocol):
    """Encodes one whole answer."""

    def inexact(self) -> None:
        """It says that the same tokens are not promised to come again."""

    def body(self, frames: list[Frame], end: End) -> bytes:
        """The response's body."""


class FunctionStream:
    """``/fn`` with SSE: an event per value. Values in parts are passed on part by part."""

    def __init__(self, call_id: str) -> None:
        self._call_id = call_id
        self._next = 0
        self._exact = True
        self._said = b""
        self.inside = False

    def frames(self, frames: list[Frame]) -> bytes:
        out: list[bytes] = []
        if self._said and not self.inside:
            out.append(self._said)
            self._said = b""
        for frame in frames:
            if frame.kind is not _OUTPUT:
                continue
            data = frame.data
            if _LF in data or _CR in data:
                data = sse.one_line(data)
            if self.inside or frame.more:
                out.append(self._part(data, frame.more))
            else:
                out.append(b"id: %d\ndata: %b\n\n" % (self._next, data))
                self._next += 1
        return b"".join(out)

    def _part(self, data: bytes, more: bool) -> bytes:
        if not self.inside:
            data = b"id: %d\ndata: %b" % (self._next, data)
            self._next += 1
        self.inside = more
        return data if more else data + b"\n\n"

    def inexact(self) -> None:
        if self._exact:
            self._exact, self._said = False, sse.comment("exact=false")

    def end(self, end: End) -> bytes:
        return b""

    def error(self, error: SllmError) -> bytes:
        # What is written of a value cannot be taken back: it ends as an event that is no output.
        broken = b"\nevent: incomplete\n\n" if self.inside else b""
        self.inside = False
        return broken + sse.event(msgspec.json.encode(error_view(error.body(), self._call_id)), name="error")

    def progress(self, progress: Progress) -> bytes:
        return sse.event(progress_json(progress), name="progress")


class FunctionBody:
    """``/fn`` without SSE: the value, or an array of what was yielded. ``streams``: whether that is so where the end
    does not say it."""

    def __init__(self, streams: bool) -> None:
        self._streams = streams

    def inexact(self) -> None:
        """A bare value has no place for it: the header says it."""

    def body(self, frames: list[Frame], end: End) -> bytes:
        values = join_values(frames)
        if self._streams if end.yielded is None else end.yielded:
            return b"[" + b",".join(values) + b"]"
        return values[0] if values else b"null"


def join_values(frames: list[Frame]) -> list[bytes]:
    """The JSON texts of the output frames, parts put together."""
    values: list[bytes] = []
    parts: list[bytes] = []
    for frame in frames:
        if frame.kind is FrameKind.OUTPUT:
            parts.append(frame.data)
            if not frame.more:
                values.append(b"".join(parts))
                parts = []
    return values


def progress_json(progress: Progress) -> bytes:
    """``ProgressView`` as JSON."""
    return msgspec.json.encode(
        {
            "stage": progress.stage,
            "done": progress.done,
            "total": progress.total,
            "unit": progress.unit,
            "message": progress.message,
        }
    )


def progress_text(progress: Progress) -> str:
    """The same for a comment."""
    return f"progress {progress_words(progress)}"


def progress_words(progress: Progress) -> str:
    """The same for people: stage, how far it is, and what it is about."""
    amount = f" {progress.done}/{progress.total} {progress.unit}" if progress.total else ""
    return f"{progress.stage}{amount} {progress.message}".rstrip()
