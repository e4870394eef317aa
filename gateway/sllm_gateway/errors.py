"""Errors as responses: ours on every route, OpenAI's shape on ``/v1``."""

from __future__ import annotations

import math
import reprlib
from typing import Any, Final

import msgspec

from sllm_gateway.asgi import JSON, Headers
from sllm_runtime.protocol.errors import ContextLengthExceeded, MethodNotAllowed, SllmError
from sllm_runtime.protocol.http import CALL_ID, SHOULD_RETRY, error_view

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
KEY: Final = "Idempotency-Key"
"""The header, as errors name it in their ``field``."""
SHOWN: Final = 100
"""Characters of a caller's own text that an error repeats."""

_QUOTED: Final = reprlib.Repr()
_QUOTED.maxstring = SHOWN


def quoted(text: str) -> str:
    """``repr`` of what a caller sent, at most ``SHOWN`` characters: the middle of a longer one is left out."""
    return _QUOTED.repr(text)


def shown(text: str) -> str:
    """``text`` itself, at most ``SHOWN`` characters: the middle of a longer one is left out."""
    half = SHOWN // 2
    return text if len(text) <= SHOWN else f"{text[: half - 1]}…{text[-half:]}"


def openai_view(error: SllmError) -> dict[str, Any]:
    """``{"error": {"message", "type", "param", "code"}}``."""
    kind = _TYPES.get(status(error, openai=True))
    if kind is None:
        kind = "invalid_request_error" if status(error, openai=True) < 500 else "server_error"
    return {"error": {"message": error.message, "type": kind, "param": error.field, "code": error.code}}


def status(error: SllmError, *, openai: bool) -> int:
    """The HTTP status: as in the table, but OpenAI's routes answer 400 to every invalid parameter; a key is none."""
    if openai and error.field != KEY and (error.status == 422 or isinstance(error, ContextLengthExceeded)):
        return 400
    return error.status


def body(error: SllmError, call_id: str | None, *, openai: bool) -> bytes:
    """The JSON body."""
    return msgspec.json.encode(openai_view(error) if openai else error_view(error.body(), call_id))


def headers(error: SllmError, call_id: str | None) -> Headers:
    """What says whether, and when, to try again."""
    found: Headers = [JSON]
    if call_id is not None:
        found.append((CALL_ID.lower().encode(), call_id.encode()))
    if not error.retryable:
        found.append((SHOULD_RETRY.encode(), b"false"))
    after = error.retry_after_s if error.retry_after_s is not None else (1.0 if error.status == 429 else None)
    if after is not None:
        found.append((b"retry-after", b"%d" % max(1, math.ceil(after))))
    if isinstance(error, MethodNotAllowed):
        found.append((b"allow", error.allow.encode()))
    if error.status == 401:
        found.append((b"www-authenticate", b"Bearer"))
    return found
