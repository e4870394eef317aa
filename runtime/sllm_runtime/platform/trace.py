"""The trace that a request belongs to (W3C Trace Context). It goes with the tasks that work for it, to their log lines,
and, as the header ``traceparent``, with what they ask over NATS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

HEADER: Final = "traceparent"
STATE: Final = "tracestate"
_VERSION: Final = "00"
_FORM: Final = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<ids>(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16})"
    r"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_SAMPLED: Final = 1
_ID: Final = slice(len("00-"), len("00-") + 32)
_ENTRY: Final = re.compile(r"[a-z0-9][a-z0-9_*/@-]{0,255}=[ -+\--<>-~]{0,255}[!-+\--<>-~]")
_ENTRIES: Final = 32
_STATE_CHARS: Final = 512
"""Of a ``tracestate`` goes on; of one that is longer the entries above _LONG_CHARS go first, then the last ones."""
_LONG_CHARS: Final = 128
_current: ContextVar[str] = ContextVar(HEADER, default="")


def checked(traceparent: str) -> str:
    """``traceparent`` if it is one; else nothing, as the specification has it: a broken one begins no trace. Of one of
    a later version what this version knows of it, as one of this version."""
    found = _FORM.fullmatch(traceparent)
    if found is None:
        return ""
    if found["version"] == _VERSION:
        return "" if found["more"] else traceparent
    return f"{_VERSION}-{found['ids']}-{int(found['flags'], 16) & _SAMPLED:02x}"


def state(tracestate: str) -> str:
    """What of a ``tracestate`` (several of one request: joined by commas) goes on beside its ``traceparent``, for
    whoever knows its entries: nobody here does. Nothing if it is none."""
    entries = [entry for each in tracestate.split(",") if (entry := each.strip(" \t"))]
    if len(entries) > _ENTRIES or not all(map(_ENTRY.fullmatch, entries)):
        return ""
    while len(",".join(entries)) > _STATE_CHARS:
        long = (number for number, entry in enumerate(entries) if len(entry) > _LONG_CHARS)
        del entries[next(long, -1)]
    return ",".join(entries)


def fresh(random: Callable[[int], bytes]) -> str:
    """A trace that begins here. Not sampled: nobody collects it but who reads logs."""
    trace, parent = (random(size).hex() for size in (16, 8))
    return checked(f"{_VERSION}-{trace}-{parent}-00")


def current() -> str:
    """That of the request that this task works for; empty: of none."""
    return _current.get()


def trace_id(traceparent: str) -> str:
    """What all parts of a trace have in common; empty for none."""
    return checked(traceparent)[_ID]


@contextmanager
def within(traceparent: str) -> Iterator[None]:
    """What is done inside, and by tasks that begin there, belongs to that trace; to none if it is empty or broken."""
    token = _current.set(checked(traceparent))
    try:
        yield
    finally:
        _current.reset(token)
