"""How long texts may be that come from who is not trusted: they end in frames, reports, records and error messages."""

from __future__ import annotations

from typing import Final

import msgspec

from sllm_runtime.protocol.errors import ErrorBody

NAME_BYTES: Final = 200
MESSAGE_BYTES: Final = 16 * 1024
DETAIL_BYTES: Final = 64 * 1024
"""With the message well below MAX_PART: an error travels in one END frame."""


def clip(text: str, nbytes: int) -> str:
    """The beginning of ``text``, at most ``nbytes`` bytes of UTF-8. Lone surrogates, which have none, are escaped."""
    if text.isascii():
        return text[:nbytes]
    return text[:nbytes].encode(errors="backslashreplace")[:nbytes].decode(errors="ignore")


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
