"""How much of what a worker says of itself is believed: it ends in reports, records and error messages."""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol.clipping import NAME_BYTES, clip
from sllm_runtime.protocol.errors import ErrorBody, SllmError
from sllm_runtime.protocol.timeline import Span, sane

REPORTED_BYTES: Final = 2000
"""Of an error in the node's report, which is sent every second."""
MAX_SPANS: Final = 32
MAX_NAMES: Final = 32
MAX_TOKENS: Final = 2**31
"""Of one call."""


def clip_report(error: SllmError) -> ErrorBody:
    """``error`` for a report: the traceback is in the log."""
    return msgspec.structs.replace(error.body(), message=clip(error.message, REPORTED_BYTES), detail=None)


def clip_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """The first of ``spans`` that can be some, with names of a bounded size."""
    return tuple(msgspec.structs.replace(span, name=clip(span.name, NAME_BYTES)) for span in sane(spans)[:MAX_SPANS])


def clip_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """The first of ``names``, each of a bounded size."""
    return tuple(clip(name, NAME_BYTES) for name in names[:MAX_NAMES])


def clip_tokens(count: int) -> int:
    """``count``, as far as it can be one."""
    return min(max(count, 0), MAX_TOKENS)
