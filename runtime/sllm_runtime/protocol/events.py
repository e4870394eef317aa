"""Things that happened, for people: typed events and log lines. Kept in bounded streams; nothing is decided by them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from sllm_runtime.protocol.limits import PROTOCOL_VERSION

DROPPED: Final = "dropped"
"""Field of an event: as many of its daemon were dropped before it, by its rate limit."""


class Kind(StrEnum):
    """What gateways, nodes and ``sllm up`` tell of themselves. The controller's kinds name a state: ``instance.ready``,
    ``version.active``, ``function.created``, ``node.lost`` (``control.changes``)."""

    GATEWAY_READY = "gateway.ready"
    GATEWAY_STOPPING = "gateway.stopping"
    CALL_FAILED = "call.failed"
    """A call ended for its caller with an error that is not the caller's own: field ``code``."""
    CALL_QUEUED = "call.queued"
    """No instance can take it now, and why."""
    CALL_COLD = "call.cold"
    """An instance has it whose start it waited for."""
    CALL_RESUMED = "call.resumed"
    """Its instance died, and it goes on elsewhere from what it had."""
    CALL_RETRIED = "call.retried"
    """Its instance died, and it begins again."""
    CALL_MOVED = "call.moved"
    """It goes on at another instance, while its own one lived."""
    CALL_CANCELLED = "call.cancelled"
    NODE_STARTED = "node.started"
    """A new life of its invoker: whatever ran on this node is gone."""
    NODE_DRAINING = "node.draining"
    """Its invoker was asked to stop; what runs there has some time to go elsewhere or to end."""
    NODE_STOPPING = "node.stopping"
    LOADER_CONNECTED = "loader.connected"
    LOADER_LOST = "loader.lost"
    """loaderd is away: running instances go on, no model can be loaded."""
    DAEMON_RESTARTED = "daemon.restarted"
    """``sllm up`` has started one of its daemons again: field ``daemon``."""


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
