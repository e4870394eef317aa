"""How long texts may be, and what errors may say, that come from who is not trusted: they end in frames, reports,
records, error messages and heads of responses."""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol.errors import ErrorBody, SllmError

NAME_BYTES: Final = 200
MESSAGE_BYTES: Final = 16 * 1024
DETAIL_BYTES: Final = 64 * 1024
"""With the message well below MAX_PART: an error travels in one END frame."""
_STATUSES: Final = range(400, 600)
_MOST_AFTER_S: Final = 86_400.0


def clip(text: str, nbytes: int) -> str:
    """The beginning of ``text``, at most ``nbytes`` bytes of UTF-8. Lone surrogates, which have none, are escaped."""
    if text.isascii():
        return text[:nbytes]
    return text[:nbytes].encode(errors="backslashreplace")[:nbytes].decode(errors="ignore")


def clip_error(error: ErrorBody) -> ErrorBody:
    """``error`` with texts of a bounded size, a status that errors have, and a time after which people try again."""

    def name(text: str | None) -> str | None:
        return None if text is None else clip(text, NAME_BYTES)

    after = error.retry_after_s
    return msgspec.structs.replace(
        error,
        status=error.status if error.status in _STATUSES else SllmError.status,
        retry_after_s=after if after is not None and 0.0 <= after <= _MOST_AFTER_S else None,
        code=clip(error.code, NAME_BYTES),
        message=clip(error.message, MESSAGE_BYTES),
        field=name(error.field),
        stage=name(error.stage),
        detail=None if error.detail is None else clip(error.detail, DETAIL_BYTES),
    )
