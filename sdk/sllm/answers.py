"""What a response means: pure functions from status, headers and body to values or typed errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from sllm.sse import Event
from sllm_runtime.protocol.errors import BY_CODE, ErrorBody, InstanceLost, SllmError
from sllm_runtime.protocol.http import CALL_ID, ProgressView
from sllm_runtime.protocol.timeline import Span, parse_comment

Observe = Callable[[ProgressView], None]
_BARE: Final = {401: "unauthorized", 403: "forbidden", 404: "not_found"}
_SILENT: Final = "what stands in front of the gateways had no answer of one"
_FRONT: Final = {
    413: "what stands in front of the gateways takes no body of this size (nginx: client_max_body_size)",
    502: f"{_SILENT}; it may have been done",
    503: f"{_SILENT}; it may have been done",
    504: f"{_SILENT} in time; it may have been done. Let it wait longer (nginx: proxy_read_timeout), or stream: "
    "a stream is never silent",
}
"""What a status means that no gateway of ours wrote: a proxy's, which is where the URL leads to."""


def ignore(_: ProgressView) -> None:
    """An observer that looks at nothing."""


@dataclass
class Trace:
    """What is known of a call beside its values; filled while its stream is read. ``observe`` sees each progress."""

    call: str | None = None
    timeline: tuple[Span, ...] = ()
    progress: ProgressView | None = None
    gateway: str | None = None
    """URL of the one that sent it."""
    broken: bool = False
    """Whether its stream, as last read, had no end."""
    cancelled: bool = True
    """Whether its call has ended with who left it; False: it is read on at a gateway that did not take the word."""
    observe: Observe = ignore


def good(status: int) -> bool:
    """Whether it is an answer to what was asked. One that sends elsewhere (a proxy's, a login page's) is none: no
    gateway of ours does, and a token is sent to nobody whom an answer names."""
    return 200 <= status < 300


def error_from(status: int, headers: Mapping[str, str], body: bytes) -> SllmError:
    """The typed exception for a response that is not ``good``, also for one that no gateway of ours wrote
    (``http_error``)."""
    retry_after = headers.get("retry-after", "")
    seconds = float(retry_after) if retry_after.replace(".", "", 1).isdigit() else None
    if not body and status in _BARE:  # the answer to a HEAD has no body
        return ErrorBody(_BARE[status], f"HTTP {status}", status).to_error()
    if not body and status == 503:  # whose, nobody can tell: no proof that a function has not seen the call
        return ErrorBody("http_error", "HTTP 503: it cannot answer just now", status, retryable=True).to_error()
    try:
        return body_of(json.loads(body)["error"], status, seconds).to_error()
    except (ValueError, KeyError, TypeError, AttributeError):
        elsewhere, text = headers.get("location", ""), _words(body)
        message = f"HTTP {status}" + (f" to {elsewhere!a:.200}" if elsewhere else "") + (f": {text}" if text else "")
        message += f" ({_FRONT.get(status, 'not from a gateway of sllm; is the URL right?')})"
        return ErrorBody("http_error", message, status, retryable=status in (429, 502, 503, 504)).to_error()


def _words(body: bytes) -> str:
    """The beginning of a page, on one line."""
    return " ".join(re.sub(rb"<[^>]*>", b" ", body[:2000]).decode("utf-8", "replace").split())[:200]


def of_a_proxy(error: SllmError) -> bool:
    """Whether it says that what stands in front of the gateways had no answer of one: what was asked may be done."""
    return error.code == "http_error" and error.status in (502, 503, 504)


def document(status: int, headers: Mapping[str, str], body: bytes) -> Any:
    """The JSON of a whole response. Raises the typed error that it carries."""
    if not good(status):
        raise error_from(status, headers, body)
    try:
        return json.loads(body) if body else None
    except ValueError as error:
        text = body[:80].decode("utf-8", "replace")
        message = f"the answer is no JSON ({text!r}): is the URL that of a gateway?"
        raise ErrorBody("http_error", message, status).to_error() from error


def body_of(error: Mapping[str, Any], status: int = 500, retry_after_s: float | None = None) -> ErrorBody:
    """An ``ErrorBody`` from the JSON of ``{"error": …}``."""
    code = str(error.get("code") or "internal")
    return ErrorBody(
        code=code,
        message=str(error.get("message") or "no message"),
        status=BY_CODE[code].status if code in BY_CODE else status,
        retryable=bool(error.get("retryable", False)),
        field=error.get("field") or error.get("param"),
        stage=error.get("stage"),
        retry_after_s=retry_after_s,
    )


def value_of(event: Event, trace: Trace) -> tuple[bool, Any]:
    """``(True, value)`` for an output; ``(False, None)`` for all else, noted in ``trace``. Raises error events."""
    if event.comment is not None:
        if event.comment.startswith("timeline "):
            trace.timeline = parse_comment(event.comment)
        return False, None
    if event.event == "error":
        raise problem_of(event)
    if event.event == "progress":
        trace.progress = ProgressView.model_validate_json(event.data)
        trace.observe(trace.progress)
        return False, None
    if event.event != "message" or event.done:
        return False, None  # events of later releases are none of the outputs
    return True, json.loads(event.data)


def problem_of(event: Event) -> SllmError:
    """What an ``error`` event says."""
    return body_of(json.loads(event.data)["error"]).to_error()


def result_of(event: Event, observe: Observe) -> str | None:
    """The JSON of a long operation's ``done`` event, once it comes. Raises what an ``error`` event carries."""
    if event.comment is None and event.event == "done":
        return event.data
    value_of(event, Trace(observe=observe))
    return None


def broken_off(trace: Trace, why: str = "") -> SllmError:
    """The stream ended without its end: the gateway or the connection died."""
    trace.broken = True
    what = f"stream of call {trace.call}" if trace.call else "stream"
    told = ": ".join(filter(None, (trace.gateway, why)))
    at = f" ({told})" if told else ""
    return InstanceLost(f"the {what} broke off before its end{at}; it may have been done in part")


def call_id(headers: Mapping[str, str]) -> str | None:
    return headers.get(CALL_ID.lower()) or headers.get(CALL_ID)
