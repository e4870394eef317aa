"""Checks a call's arguments against the function's JSON Schema before anything is started for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import msgspec

from sllm_gateway.errors import shown
from sllm_runtime.protocol.errors import InvalidArgument, InvalidManifest, MalformedJson

IN_THREAD_BYTES = 2**18
"""Larger bodies are parsed beside the event loop."""


def parse(body: bytes) -> Any:
    """The JSON value of ``body``. Raises ``MalformedJson`` with the place."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedJson(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise MalformedJson("the body is nested too deeply") from error


class Arguments:
    """The checker of one version. Raises ``InvalidManifest`` for a ``schema`` that is none, or not whole in itself."""

    def __init__(self, schema: dict[str, Any]) -> None:
        try:
            self._validator = jsonschema_rs.validator_for(schema, offline=True)  # no $ref opens a URL or a file here
        except ValueError as error:
            why = _short(str(error).partition("\n")[0])
            raise InvalidManifest(
                f"the function's input_schema is no valid JSON Schema: {why}; correct its type hints, deploy again",
                field="handler.input_schema",
            ) from error

    async def check(self, body: bytes) -> bytes:
        """The body to hand on (``{}`` for none). Raises ``MalformedJson`` or ``InvalidArgument`` with the path."""
        if len(body) > IN_THREAD_BYTES:
            await asyncio.to_thread(self.check_now, body)
        elif body and not body.isspace():
            self.check_now(body)
        else:
            body = b"{}"
            self._check_value({})
        return body

    def check_now(self, body: bytes) -> None:
        """As ``check``, at once."""
        self._check_value(parse(body))

    def _check_value(self, value: Any) -> None:
        if not isinstance(value, dict):
            raise InvalidArgument(f"the body must be a JSON object of arguments, not {_json_type(value)}")
        if self._validator.is_valid(value):
            return
        raise _explain(next(self._validator.iter_errors(value)))


def _explain(error: jsonschema_rs.ValidationError) -> InvalidArgument:
    path: list[str | int] = list(error.instance_path)
    if error.kind.name == "required":
        path.append(error.kind.as_dict()["property"])
        field = path_text(path)
        return InvalidArgument(f"argument {field!r} is missing", field=field)
    if error.kind.name == "additionalProperties":
        path.append(error.kind.as_dict()["unexpected"][0])
        field = path_text(path)
        return InvalidArgument(f"unknown argument {field!r}", field=field)
    field = path_text(path)
    return InvalidArgument(f"argument {field!r}: {_short(error.message)}", field=field)


def path_text(path: Sequence[str | int]) -> str:
    """``["a", 0, "b"]`` as ``a[0].b``. Names in it may be the caller's own: a long one is cut as in every error."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return shown(text)


def _short(message: str) -> str:
    return message if len(message) <= 300 else f"{message[:140]} … {message[-140:]}"


def _json_type(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
