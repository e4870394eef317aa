"""One table per lifecycle. Whoever moves an instance or a call asks ``check`` first; docs are made from these."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, TypeVar

from sllm_runtime.protocol.errors import ProtocolError


class InstanceState(StrEnum):
    """An instance as its node sees it and the controller records it."""

    PENDING = "PENDING"  # placed by the controller, not yet accepted by its node
    STARTING = "STARTING"  # has a sandbox or waits for one; ``stage`` says how far it is
    READY = "READY"
    DRAINING = "DRAINING"  # takes no new call; running ones go on
    STOPPED = "STOPPED"  # ended as asked
    FAILED = "FAILED"  # never became ready
    LOST = "LOST"  # was ready, then died or fell silent


class CallState(StrEnum):
    """A call as its caller sees it."""

    QUEUED = "QUEUED"
    STARTING = "STARTING"  # waits for an instance that is being started for it
    RUNNING = "RUNNING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class MigrationState(StrEnum):
    """One instance's running calls on their way to another instance."""

    PREPARING = "PREPARING"  # the destination starts; the source works as ever
    MOVING = "MOVING"  # gateways carry the calls over one by one; the source takes no new one
    DONE = "DONE"  # the source has no call left and has ended
    ABANDONED = "ABANDONED"  # either of them is gone, or they cannot be exchanged: what did not move goes on


class VersionState(StrEnum):
    """A version of a function."""

    PREPARING = "PREPARING"  # its model is being registered, its first instance started
    ACTIVE = "ACTIVE"  # has the route
    RETIRED = "RETIRED"  # had it; rollback can bring it back
    FAILED = "FAILED"  # no instance of it ever started
    DELETED = "DELETED"


INSTANCE: Final[dict[InstanceState, frozenset[InstanceState]]] = {
    InstanceState.PENDING: frozenset(
        {InstanceState.STARTING, InstanceState.STOPPED, InstanceState.FAILED, InstanceState.LOST}
    ),
    InstanceState.STARTING: frozenset(
        {InstanceState.READY, InstanceState.STOPPED, InstanceState.FAILED, InstanceState.LOST}
    ),
    InstanceState.READY: frozenset({InstanceState.DRAINING, InstanceState.STOPPED, InstanceState.LOST}),
    InstanceState.DRAINING: frozenset({InstanceState.STOPPED, InstanceState.LOST}),
    InstanceState.STOPPED: frozenset(),
    InstanceState.FAILED: frozenset(),
    InstanceState.LOST: frozenset(),
}
CALL: Final[dict[CallState, frozenset[CallState]]] = {
    CallState.QUEUED: frozenset({CallState.STARTING, CallState.RUNNING, CallState.FAILED, CallState.CANCELLED}),
    CallState.STARTING: frozenset({CallState.QUEUED, CallState.RUNNING, CallState.FAILED, CallState.CANCELLED}),
    CallState.RUNNING: frozenset({CallState.QUEUED, CallState.SUCCEEDED, CallState.FAILED, CallState.CANCELLED}),
    CallState.SUCCEEDED: frozenset(),
    CallState.FAILED: frozenset(),
    CallState.CANCELLED: frozenset(),
}
MIGRATION: Final[dict[MigrationState, frozenset[MigrationState]]] = {
    MigrationState.PREPARING: frozenset({MigrationState.MOVING, MigrationState.ABANDONED}),
    MigrationState.MOVING: frozenset({MigrationState.DONE, MigrationState.ABANDONED}),
    MigrationState.DONE: frozenset(),
    MigrationState.ABANDONED: frozenset(),
}
VERSION: Final[dict[VersionState, frozenset[VersionState]]] = {
    VersionState.PREPARING: frozenset(
        {VersionState.ACTIVE, VersionState.RETIRED, VersionState.FAILED, VersionState.DELETED}
    ),
    VersionState.ACTIVE: frozenset({VersionState.RETIRED, VersionState.DELETED}),
    VersionState.RETIRED: frozenset({VersionState.ACTIVE, VersionState.DELETED}),
    VersionState.FAILED: frozenset({VersionState.DELETED, VersionState.PREPARING}),
    VersionState.DELETED: frozenset(),
}

S = TypeVar("S", bound=StrEnum)


def check(table: dict[S, frozenset[S]], old: S, new: S) -> S:
    """``new``, if the table allows it from ``old`` (staying is always allowed). Raises ``ProtocolError``."""
    if new != old and new not in table[old]:
        raise ProtocolError(f"{type(old).__name__} cannot go from {old} to {new}")
    return new


def final(table: dict[S, frozenset[S]], state: S) -> bool:
    """Whether nothing follows ``state``."""
    return not table[state]
