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
from sllm_runtime.protocol.subjects import forget_consumer

HEARTBEAT_S: Final = 1.0
SILENCE_S: Final = 4.0
"""A consumer that has sent neither a message nor a heartbeat for so long is not trusted any more."""
_GONE_AFTER_S: Final = 30.0
"""The server forgets it by itself after this long: its reader was killed."""
_NOTHING: Final = msgspec.Raw(b"")


def consumer(inbox: str, subject: str | Sequence[str], policy: DeliverPolicy) -> ConsumerConfig:
    """What sends everything under ``subject`` (or several) to ``inbox``, unacknowledged. Its name is chosen here, so
    that whoever is interrupted while it is made can have it forgotten."""
    return ConsumerConfig(
        name=secrets.token_hex(8),
        deliver_subject=inbox,
        filter_subject=subject if isinstance(subject, str) else None,
        filter_subjects=None if isinstance(subject, str) else list(subject),
        deliver_policy=policy,
        ack_policy=AckPolicy.NONE,
        max_deliver=1,
        idle_heartbeat=HEARTBEAT_S,
        inactive_threshold=_GONE_AFTER_S,
        mem_storage=True,
        num_replicas=1,
    )


def forget(bus: Bus, stream: str, made: ConsumerConfig) -> None:
    """Nobody reads it any more. Nobody waits for that either: where it is refused or lost, the server forgets it by
    itself later."""
    if not bus.connected:
        return
    with contextlib.suppress(SllmError):
        bus.publish_now(forget_consumer(stream, made.name or ""), _NOTHING)
