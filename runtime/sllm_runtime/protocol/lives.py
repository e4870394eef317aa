"""Lives of gateways, and the log of each: what another gateway needs to go on with the streams of one that has died.

A life lasts from a gateway's start to its end, or until another gateway has declared it over: whoever rewrites its
``Life`` record has its calls, and every write of its log depends on that record (a fence).
"""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol.calls import CallOrder
from sllm_runtime.protocol.frames import Ids
from sllm_runtime.protocol.limits import KIB
from sllm_runtime.protocol.records import Record

BEAT_S: Final = 1.0
"""A gateway writes its ``Life`` so often."""
SILENT_BEATS: Final = 5
"""A life is over when it has not beaten during so many acknowledged beats of another: that is as long as nodes wait for
a gateway before they cancel what it runs."""
OVERDUE_BEATS: Final = 2
"""When it has not for so many, NATS is asked whether its gateway is there at all: see ``platform/presence.py``."""
LIVES_AGE_S: Final = 120.0
"""What is written is kept for so long."""
WHOLE_S: Final = 20.0
"""Each open stream is written whole so often: far within LIVES_AGE_S."""
MOST_LOGGED: Final = 128 * KIB
"""Streams whose request is larger are not logged: they end with their gateway."""
TAG: Final = 6
"""So many characters of a life's name begin the random part of its calls' ids."""


class Life(Record, frozen=True, kw_only=True):
    """That a gateway lives, or who has what it left."""

    life: str
    gateway: str
    beat: int = 0
    over: bool = False
    """It has ended in order."""
    heir: str = ""
    """The life that has declared it over, and takes over its calls."""
    settled: bool = False
    """That has been done."""


class Whole(msgspec.Struct, frozen=True, kw_only=True, tag="whole"):
    """All that is known of a stream. ``ids``: by generation. ``epoch`` 0: no instance has it yet. ``numerics`` and
    ``exact``: of an instance that is asked as if it had it. ``drawing``: so often its ids were thrown away."""

    order: CallOrder
    body: bytes
    epoch: int
    numerics: str
    exact: bool
    ids: tuple[tuple[int, ...], ...]
    drawing: int = 0


class More(msgspec.Struct, frozen=True, kw_only=True, tag="more"):
    """What a stream has brought since it was last told."""

    call: str
    epoch: int
    numerics: str
    exact: bool
    ids: tuple[Ids, ...]
    delivered: int = 0
    """As in ``CallOrder``."""
    delivered_hash: bytes = b""
    drawing: int = 0


class Gone(msgspec.Struct, frozen=True, tag="gone"):
    """A stream that has ended."""

    call: str


LogEntry = Whole | More | Gone


class Log(Record, frozen=True):
    """One message of a life's log."""

    entries: tuple[LogEntry, ...]


class AskHeard(msgspec.Struct, frozen=True, kw_only=True):
    """What was heard of a life's log after message ``after``, asked by who takes that life over."""

    life: str
    after: int


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """The next messages by number, as many as fit; none: there are no more."""

    logs: dict[int, Log]
