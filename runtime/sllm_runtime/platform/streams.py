"""The JetStream streams of the platform. The controller makes them at its start; everybody else waits for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import fields
from typing import Final

import nats.errors
import nats.js.errors
from nats.js.api import DiscardPolicy, PersistMode, RetentionPolicy, StorageType, StoreCompression, StreamConfig

from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.limits import MAX_BODY, MIB
from sllm_runtime.protocol.lives import LIVES_AGE_S

log = logging.getLogger(__name__)

STATE_STREAM: Final = f"KV_{subjects.STATE}"
BUNDLE_STREAM: Final = f"OBJ_{subjects.BUNDLES}"
LAST_STREAM: Final = subjects.KEYS_STREAM
"""Made after all others: when it is there, all are. Behind CALLS_STREAM, which had its subjects in earlier releases."""
WITHIN_S: Final = 25.0
"""How long a daemon that starts waits for them: less than its supervisor waits for it, who does not know why."""
_AGAIN_S: Final = 0.05
DECISIONS_KEPT: Final = 64
"""Messages about starts of one function: two of each."""
_OVERHEAD: Final = 32 * MIB
"""Of a store: what messages take beside what they hold."""
_DAY_S: Final = 24 * 3600.0
WRONG_SEQUENCE: Final = (10071, 10164)
"""JetStream's codes for a message whose expected last sequence, of its subject or of the fence, is another one."""
STORE_FAILED: Final = 10077
"""JetStream's code for a stream, or a store, that takes no more."""
_NAME_IN_USE: Final = 10058
_SERVERS_OWN: Final = frozenset({"duplicate_window", "metadata", "consumer_limits"})
"""Settings that we never make, and a server does."""
_NOTHING_SAID: Final = (None, 0, -1, False, "", StoreCompression.NONE)
_NO_RESOURCES: Final = (10005, 10023, 10047, 10074)


def _configs(replicas: int, bundle_bytes: int = 0) -> list[StreamConfig]:
    # The server writes through to the disk at once (``sync_interval: always``), which lines of logs need not wait for.
    relaxed = PersistMode.ASYNC if replicas == 1 else None
    state = StreamConfig(
        name=STATE_STREAM,
        subjects=[f"$KV.{subjects.STATE}.>"],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_bytes=256 * MIB,
        allow_rollup_hdrs=True,
        allow_direct=True,
        allow_msg_ttl=True,
        deny_delete=True,
    )
    bundles = StreamConfig(
        name=BUNDLE_STREAM,
        subjects=[f"$O.{subjects.BUNDLES}.C.>", f"$O.{subjects.BUNDLES}.M.>"],
        discard=DiscardPolicy.NEW,
        max_bytes=bundle_bytes or None,
        allow_rollup_hdrs=True,
        allow_direct=True,
    )
    logs = StreamConfig(
        name=subjects.LOGS_STREAM,
        subjects=["sllm.logs.>"],
        max_age=7 * _DAY_S,
        max_bytes=256 * MIB,
        allow_direct=True,
        # Log lines come without acknowledgement: nobody would read it.
        no_ack=True,
        persist_mode=relaxed,
    )
    events = StreamConfig(
        name=subjects.EVENTS_STREAM,
        subjects=[subjects.EVENTS_ALL],
        max_age=7 * _DAY_S,
        max_bytes=64 * MIB,
        allow_direct=True,
        no_ack=True,
        persist_mode=relaxed,
    )
    decisions = StreamConfig(
        name=subjects.DECISIONS_STREAM,
        subjects=[subjects.DECISIONS],
        max_msgs_per_subject=DECISIONS_KEPT,
        max_age=7 * _DAY_S,
        max_bytes=32 * MIB,
        allow_direct=True,
        no_ack=True,
        persist_mode=relaxed,
    )
    journal = StreamConfig(
        name=subjects.JOURNAL_STREAM,
        subjects=[subjects.call_entries(subjects.JOURNAL_STREAM)],
        max_msgs_per_subject=1,
        max_bytes=128 * MIB,
        allow_direct=True,
        allow_msg_ttl=True,
        # On a cluster two other servers have it. One alone would lose it with its process, so it goes through a file,
        # and not a relaxed one: a server that is killed loses the last entry it has acknowledged there, and whoever
        # reads the journal would find nothing of what follows that.
        storage=StorageType.FILE if replicas == 1 else StorageType.MEMORY,
    )
    lives = StreamConfig(
        name=subjects.LIVES_STREAM,
        subjects=["sllm.lives.>"],
        max_msgs_per_subject=1,
        max_age=LIVES_AGE_S,
        max_bytes=64 * MIB,
        allow_direct=True,
        storage=StorageType.FILE if replicas == 1 else StorageType.MEMORY,
    )
    calls = StreamConfig(
        name=subjects.CALLS_STREAM,
        subjects=[subjects.call_entries(subjects.CALLS_STREAM)],
        max_msgs_per_subject=1,
        discard=DiscardPolicy.NEW,
        max_bytes=128 * MIB,
        allow_direct=True,
        allow_msg_ttl=True,
    )
    # Four of the largest and one more for all smaller ones: a body takes no more than half of what is left (``room``).
    bodies = calls.evolve(
        name=subjects.BODIES_STREAM,
        subjects=[subjects.call_entries(subjects.BODIES_STREAM)],
        max_bytes=5 * MAX_BODY,
    )
    keys = calls.evolve(name=subjects.KEYS_STREAM, subjects=[subjects.KEY_CLAIMS], max_bytes=16 * MIB)
    return [
        config.evolve(
            storage=config.storage or StorageType.FILE, retention=RetentionPolicy.LIMITS, num_replicas=replicas
        )
        for config in (state, bundles, logs, events, decisions, journal, lives, calls, bodies, keys)
    ]


def room_for_bundles(store_bytes: int) -> int:
    """Most bytes of bundles on our own server, which stores ``store_bytes`` in all: what the others may take is left to
    them, since a store that is full refuses them, too, whatever their own limits are. Gateways keep it; it is no limit
    of their stream's there: that would be set aside, and be refused at the next start where the disk has less by then.
    """
    others = sum(config.max_bytes or 0 for config in _configs(1) if config.storage is StorageType.FILE)
    return max(store_bytes - others - _OVERHEAD, _OVERHEAD)


async def ensure_streams(bus: Bus, replicas: int = 1, *, bundle_bytes: int = 0, within_s: float = WITHIN_S) -> None:
    """Make every stream, or bring an existing one up to date; ``bundle_bytes``: the limit of that with bundles, 0 for
    none of its own. What fails is tried again, since a disk that is busy or
    servers that have just met answer later. Raises ``Unavailable`` after ``within_s`` seconds, which says which stream
    was waited for and what JetStream lacks."""

    async def ensure() -> None:
        for config in _configs(replicas, bundle_bytes):
            await _ensure(bus, config)

    await _patiently(ensure, within_s)


async def await_streams(bus: Bus, *, within_s: float = WITHIN_S) -> None:
    """Until a controller has made them. Raises ``Unavailable`` after ``within_s`` seconds."""

    async def look() -> None:
        try:
            await bus.jetstream.stream_info(LAST_STREAM)
        except nats.js.errors.NotFoundError as error:
            raise Unavailable("the platform has no state yet: no controller has started") from error
        except nats.errors.Error as error:
            raise _silent(LAST_STREAM, error) from error

    await _patiently(look, within_s)


async def _patiently(attempt: Callable[[], Awaitable[None]], within_s: float) -> None:
    began, told = time.monotonic(), False
    while True:
        try:
            await attempt()
            return
        except Unavailable as error:
            waited_s = time.monotonic() - began
            if waited_s >= within_s:
                raise Unavailable(f"{error.message} (asked again for {waited_s:.0f} s)") from error
            if not told:
                log.warning("%s; asked again for %g s", error.message, within_s)
                told = True
        await asyncio.sleep(_AGAIN_S)  # nothing tells that it is different now


async def _ensure(bus: Bus, config: StreamConfig) -> None:
    # Looked for first: who makes one again with a limit needs as much room as it has once more.
    try:
        there = (await bus.jetstream.stream_info(config.name or "")).config
    except nats.js.errors.NotFoundError:
        await _create(bus, config)
    except nats.errors.Error as error:
        raise _silent(config.name or "", error) from error
    else:
        wanted = config.evolve(persist_mode=there.persist_mode)  # fixed when a stream is made
        if not _same(wanted, there):  # servers that are a cluster answer but one of two who change a stream at once
            await _update(bus, wanted)


def _same(wanted: StreamConfig, there: StreamConfig) -> bool:
    """Whether a server has what is ``wanted``, which leaves some to it."""
    names = {each.name for each in fields(StreamConfig)} - _SERVERS_OWN
    return all(_said(getattr(wanted, name)) == _said(getattr(there, name)) for name in names)


def _said(value: object) -> object:
    return None if value in _NOTHING_SAID else value


async def _create(bus: Bus, config: StreamConfig) -> None:
    try:
        await bus.jetstream.add_stream(config)
    except nats.js.errors.APIError as error:
        if error.err_code == _NAME_IN_USE:
            raise Unavailable(
                f"another controller has just made the stream {config.name} with other settings"
            ) from error
        raise _cannot(config, error) from error
    except nats.errors.Error as error:
        raise _silent(config.name or "", error) from error


async def _update(bus: Bus, config: StreamConfig) -> None:
    try:
        await bus.jetstream.update_stream(config)
    except nats.errors.Error as error:
        if isinstance(error, nats.js.errors.APIError) and error.err_code in _NO_RESOURCES:
            raise _cannot(config, error) from error
        raise Unavailable(
            f"stream {config.name} is there with other settings, which cannot be changed: {error}"
        ) from error


def _silent(stream: str, error: nats.errors.Error) -> Unavailable:
    return Unavailable(f"JetStream does not answer about the stream {stream}: {str(error) or type(error).__name__}")


def _cannot(config: StreamConfig, error: nats.js.errors.APIError) -> Unavailable:
    hint = ""
    if error.err_code in _NO_RESOURCES:
        hint = f"; free disk for JetStream, or set SLLM_REPLICAS to what the cluster has (now {config.num_replicas})"
        if config.name == BUNDLE_STREAM and config.max_bytes:
            hint += f", or SLLM_BUNDLE_BYTES to less than {config.max_bytes}, which is set aside for bundles"
    return Unavailable(f"JetStream refuses the stream {config.name}: {error.description}{hint}")
