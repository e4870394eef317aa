"""Things that happened, for people: typed events and log lines. Kept in bounded streams; nothing is decided by them."""

from __future__ import annotations

import msgspec

from sllm_runtime.protocol.limits import PROTOCOL_VERSION


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A state change. ``kind`` as ``instance.ready``, ``version.active``, ``call.failed``; ``at`` Unix seconds."""

    kind: str
    at: float
    component: str
    message: str = ""
    function: str | None = None
    version: int | None = None
    instance: str | None = None
    node: str | None = None
    call: str | None = None
    fields: dict[str, str] = msgspec.field(default_factory=dict)
    schema: int = PROTOCOL_VERSION


class LogRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A line that a function wrote, or the traceback of what it raised. Outlives its instance."""

    at: float
    function: str
    version: int
    instance: str
    node: str
    stream: str
    text: str
    level: str = "info"
    call: str | None = None
    dropped: int = 0
    """Lines lost to the rate limit just before this one."""
    schema: int = PROTOCOL_VERSION
