"""Things that happened, for people: typed events and log lines. Kept in bounded streams; nothing is decided by them."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import msgspec

from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.states import InstanceState, MigrationState, VersionState

DROPPED: Final = "dropped"
"""Field of an event: as many of its daemon were dropped before it, by its rate limit."""


class Kind(StrEnum):
    """All that is told. Of instances, versions and migrations it names a state: ``of_state``."""

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
    INSTANCE_PENDING = "instance.pending"
    INSTANCE_STARTING = "instance.starting"
    INSTANCE_READY = "instance.ready"
    INSTANCE_DRAINING = "instance.draining"
    INSTANCE_STOPPED = "instance.stopped"
    INSTANCE_FAILED = "instance.failed"
    INSTANCE_LOST = "instance.lost"
    INSTANCE_RELEASED = "instance.released"
    """Its node has given back what it held."""
    VERSION_PREPARING = "version.preparing"
    VERSION_ACTIVE = "version.active"
    VERSION_RETIRED = "version.retired"
    VERSION_FAILED = "version.failed"
    VERSION_DELETED = "version.deleted"
    FUNCTION_CREATED = "function.created"
    FUNCTION_DELETING = "function.deleting"
    FUNCTION_DELETED = "function.deleted"
    MIGRATION_PREPARING = "migration.preparing"
    MIGRATION_MOVING = "migration.moving"
    MIGRATION_DONE = "migration.done"
    MIGRATION_ABANDONED = "migration.abandoned"
    NODE_JOINED = "node.joined"
    NODE_ALIVE = "node.alive"
    """It is heard, again or for the first time."""
    NODE_LOST = "node.lost"
    """It has fallen silent."""
    NODE_CORDONED = "node.cordoned"
    NODE_UNCORDONED = "node.uncordoned"
    NODE_LEAVING = "node.leaving"
    """Of nodes that come and go: it is idle, and is given back once it is empty."""
    NODE_STAYS = "node.stays"
    NODE_GIVEN_BACK = "node.given_back"
    NODE_REMOVED = "node.removed"
    POOL_GROWS = "pool.grows"

    @classmethod
    def of_state(cls, of: str, state: InstanceState | MigrationState | VersionState) -> Kind:
        """That ``of`` (``instance``, ``migration``, ``version``) has come to ``state``."""
        return cls(f"{of}.{state.lower()}")


KINDS: Final = frozenset({*Kind, *(kind.partition(".")[0] for kind in Kind)})
"""What can be asked for: a kind, or the first word of several."""


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
