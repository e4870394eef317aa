"""What the OpenAPI document says of paths, queries and headers: patterns and bounds as the routes check them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from sllm_runtime.platform import trace
from sllm_runtime.protocol import http
from sllm_runtime.protocol.events import KINDS
from sllm_runtime.protocol.manifest import NAME
from sllm_runtime.protocol.secrets import SECRET_NAME
from sllm_runtime.protocol.states import CallState

Schema: TypeAlias = dict[str, Any]


def _text(pattern: re.Pattern[str] | str) -> Schema:
    """JSON Schema's expressions are ECMA's, whose ``$`` is Python's ``\\Z``."""
    expression = pattern if isinstance(pattern, str) else pattern.pattern
    return {"type": "string", "pattern": expression.replace(r"\Z", "$")}


_TEXT: Final[Schema] = {"type": "string"}
_YES_OR_NO: Final[Schema] = {"type": "boolean", "default": False}
_NUMBER: Final = _text("^[0-9]{1,18}$")
_PATH: Final[Mapping[str, Schema]] = {
    "functions/name": _text(NAME),
    "fn/name": _text(NAME),
    "version": _text(http.VERSION_PART),
    "secrets/name": _text(SECRET_NAME),
    "models/digest": _text(http.MODEL_DIGEST),
    "bundles/digest": _text(http.BUNDLE_DIGEST),
    "deployments/request": _text(http.REQUEST_ID),
    "wish": {"type": "string", "enum": list(http.NODE_WISHES)},
}
"""By the part before it where names are several."""
_QUERY: Final[Mapping[str, tuple[Schema, str]]] = {
    "follow": (_YES_OR_NO, "Go on with what comes after the last that is there"),
    "begun": (_YES_OR_NO, "Asked before: a function that is gone is deleted, not unknown"),
    "force": (_YES_OR_NO, "Cancel what runs"),
    "detail": (_YES_OR_NO, "What lies where on each"),
    "since": ({"type": "number"}, "Unix time in seconds: nothing from before"),
    "ago": ({"type": "number", "minimum": 0}, "Of the last so many seconds, by the gateway's clock; goes before since"),
    "function": (_text(NAME), "Of this function alone"),
    "call": (_text(http.CALL_PART), "Of this call alone"),
    "kind": ({"type": "string", "enum": sorted(KINDS)}, "Of this kind, or of all that begin with this word"),
    "state": ({"type": "string", "enum": list(CallState.__members__)}, "In this state alone"),
    "after": (_TEXT, "Behind this place: the `next` of the page before"),
    "limit": ({"type": "integer"}, "At most so many"),
}
_LIMITS: Final[Mapping[str, Schema]] = {
    http.CALLS: {"minimum": 1, "maximum": http.MOST_CALLS, "default": http.SOME_CALLS},
    "": {"minimum": 0, "maximum": http.MOST_LINES, "default": http.SOME_LINES},
}
"""Of ``limit``, by path; else as of logs."""
_HEADERS: Final[Mapping[str, tuple[Schema, str]]] = {
    "Last-Event-ID": (_NUMBER, "The number of the last event that came: go on behind it"),
    "Idempotency-Key": (
        _text(http.IDEMPOTENCY_KEY),
        "One execution: sent again with the same body, the same answer",
    ),
    "Prefer": (_TEXT, "`respond-async`: 202 at once, the call goes on without a reader; see `/v1/calls/{call}`"),
    trace.HEADER: (_TEXT, "W3C trace context"),
    trace.STATE: (_TEXT, "The same: passed on to the function beside it"),
}
READS_ON: Final = ("Last-Event-ID",)
CALLS: Final = ("Idempotency-Key", "Prefer", trace.HEADER, trace.STATE)


def of_path(path: str) -> list[Schema]:
    """Those of ``path``, in order."""
    parts = path.strip("/").split("/")
    named = [(before, part[1:-1]) for before, part in zip(["", *parts], parts, strict=False) if part.startswith("{")]
    return [_parameter(name, "path", _PATH.get(f"{before}/{name}", _PATH.get(name, _TEXT))) for before, name in named]


def of_query(path: str, name: str) -> Schema:
    """One in the query of ``path``."""
    schema, about = _QUERY[name]
    limits = _LIMITS.get(path, _LIMITS[""]) if name == "limit" else {}
    return _parameter(name, "query", {**schema, **limits}, about)


def of_header(name: str) -> Schema:
    """A header that may be given."""
    schema, about = _HEADERS[name]
    return _parameter(name, "header", schema, about)


def _parameter(name: str, place: str, schema: Schema, about: str = "") -> Schema:
    described = {"description": about} if about else {}
    return {"name": name, "in": place, "required": place == "path", **described, "schema": schema}
