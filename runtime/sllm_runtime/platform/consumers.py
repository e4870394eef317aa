"""A reader's consumer at a stream: made for one reader, and forgotten as soon as that has ended."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Final

import msgspec
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.subjects import forget_consumer, next_messages

HEARTBEAT_S: Final = 1.0
_GONE_AFTER_S: Final = 30.0
"""The server forgets it by itself after this long: its reader was killed."""
_ASKED_S: Final = 3600.0
"""So long what was asked for may come: heartbeats are only to be had with an end."""
_NOTHING: Final = msgspec.Raw(b"")


def consumer(subject: str | Sequence[str], policy: DeliverPolicy) -> ConsumerConfig:
    """What has everything under ``subject`` (or several), and sends of it what ``ask`` asks for, unacknowledged. Its
    name is chosen here, so that whoever is interrupted while it is made can have it forgotten."""
    return ConsumerConfig(
        name=secrets.token_hex(8),
        filter_subject=subject if isinstance(subject, str) else None,
        filter_subjects=None if isinstance(subject, str) else list(subject),
        deliver_policy=policy,
        ack_policy=AckPolicy.NONE,
        max_deliver=1,
        inactive_threshold=_GONE_AFTER_S,
        mem_storage=True,
        num_replicas=1,
    )


async def ask(bus: Bus, stream: str, made: ConsumerConfig, inbox: str, most: int, nbytes: int) -> None:
    """Have it send what is there, or comes, to ``inbox``: at most so many messages, of so many bytes in all. A status
    other than a heartbeat's says that no more comes. Raises ``Unavailable``."""
    asked = {
        "batch": most,
        "max_bytes": nbytes,
        "expires": int(_ASKED_S * 1e9),
        "idle_heartbeat": int(HEARTBEAT_S * 1e9),
    }
    await bus.ask_raw(next_messages(stream, made.name or ""), msgspec.json.encode(asked), inbox)


def forget(bus: Bus, stream: str, made: ConsumerConfig) -> None:
    """Nobody reads it any more. Nobody waits for that either: where it is refused or lost, the server forgets it by
    itself later."""
    if not bus.connected:
        return
    with contextlib.suppress(SllmError):
        bus.publish_now(forget_consumer(stream, made.name or ""), _NOTHING)
