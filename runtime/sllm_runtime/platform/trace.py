"""The trace that a request belongs to (W3C Trace Context). It goes with the tasks that work for it, to their log lines,
and, as the header ``traceparent``, with what they ask over NATS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

HEADER: Final = "traceparent"
_FORM: Final = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_current: ContextVar[str] = ContextVar(HEADER, default="")


def checked(traceparent: str) -> str:
    """``traceparent`` if it is one; else nothing, as the specification has it: a broken one begins no trace."""
    return traceparent if _FORM.fullmatch(traceparent) else ""


def fresh(random: Callable[[int], bytes]) -> str:
    """A trace that begins here. Not sampled: nobody collects it but who reads logs."""
    trace, parent = (random(size).hex() for size in (16, 8))
    return checked(f"00-{trace}-{parent}-00")


def current() -> str:
    """That of the request that this task works for; empty: of none."""
    return _current.get()


def trace_id(traceparent: str) -> str:
    """What all parts of a trace have in common; empty for none."""
    found = _FORM.fullmatch(traceparent)
    return found[1] if found else ""


@contextmanager
def within(traceparent: str) -> Iterator[None]:
    """What is done inside, and by tasks that begin there, belongs to that trace; to none if it is empty or broken."""
    token = _current.set(checked(traceparent))
    try:
        yield
    finally:
        _current.reset(token)
