"""How much of what a worker says of itself is believed: it ends in reports, records and error messages."""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol.errors import ErrorBody, SllmError
from sllm_runtime.protocol.timeline import Span, sane

NAME_BYTES: Final = 200
MESSAGE_BYTES: Final = 16 * 1024
REPORTED_BYTES: Final = 2000
"""Of an error in the node's report, which is sent every second."""
DETAIL_BYTES: Final = 64 * 1024
"""With the message well below MAX_PART: an error travels in one END frame."""
MAX_SPANS: Final = 32
MAX_NAMES: Final = 32
MAX_TOKENS: Final = 2**31
"""Of one call."""


def clip(text: str, nbytes: int) -> str:
    """The beginning of ``text``, at most ``nbytes`` bytes of UTF-8."""
    if len(text) * 4 <= nbytes:
        return text
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= nbytes else encoded[:nbytes].decode(errors="ignore")


def clip_error(error: ErrorBody) -> ErrorBody:
    """``error`` with texts of a bounded size."""

    def name(text: str | None) -> str | None:
        return None if text is None else clip(text, NAME_BYTES)

    return msgspec.structs.replace(
        error,
        code=clip(error.code, NAME_BYTES),
        message=clip(error.message, MESSAGE_BYTES),
        field=name(error.field),
        stage=name(error.stage),
        detail=None if error.detail is None else clip(error.detail, DETAIL_BYTES),
    )


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
