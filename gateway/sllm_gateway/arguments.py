"""Checks a call's arguments against the function's JSON Schema before anything is started for it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import msgspec

from sllm_gateway.errors import shown
from sllm_gateway.expansion import expansion, extent
from sllm_runtime.protocol.errors import InvalidArgument, InvalidManifest, MalformedJson

IN_THREAD_BYTES = 2**18
"""Larger bodies are parsed beside the event loop."""
CHECKS = 100_000
"""Comparisons that a body may take here, a few milliseconds, and so many more for each of its bytes:"""
CHECKS_A_BYTE = 16
MOST_CHECKS = 20_000_000
"""However large it is: nothing else runs meanwhile."""
EXPLAINED = 4_000
"""Of more it takes too long to say what is wrong."""
EXPLAINED_BYTES = 4 * 2**20
"""Of a larger body what is wrong is not told: the error has the value for itself, in a form that takes up to 30 times
its text, and so has each branch of a union that refuses it."""
PATTERNED = 2**16
"""Bytes of a body whose texts are held against regular expressions here."""
_WRONG = "the arguments are not of the function's types; which one takes too long to find out"
_LOOKED_AT = 100_000
"""Values of a body that may be looked at for how deep they lie."""


def parse(body: bytes) -> Any:
    """The JSON value of ``body``. Raises ``MalformedJson`` with the place."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedJson(f"the body is no JSON: {error}") from error
    except RecursionError as error:
        raise MalformedJson("the body is nested too deeply") from error


def given(body: bytes) -> bytes:
    """What a request with that body gives: ``{}`` for none."""
    return body if len(body) > IN_THREAD_BYTES or (body and not body.isspace()) else b"{}"


class Arguments:
    """The checker of one version. Raises ``InvalidManifest`` for a ``schema`` that is none, or not whole in itself.

    What would take too long here is left to the function's own process, which checks by its type hints.
    """

    def __init__(self, schema: dict[str, Any]) -> None:
        try:
            self._validator = jsonschema_rs.validator_for(schema, offline=True)  # no $ref opens a URL or a file here
        except ValueError as error:
            why = _short(str(error).partition("\n")[0])
            raise InvalidManifest(
                f"the function's input_schema is no valid JSON Schema: {why}; correct its type hints, deploy again",
                field="handler.input_schema",
            ) from error
        self._expansion = told = expansion(schema)
        self._free = (CHECKS - told.checks[0]) // max(1, told.cost(1) - told.checks[0]) if told is not None else -1
        """Bodies of so many bytes take no more than CHECKS, whatever is in them: each value has a byte at least."""
        if told is not None and told.patterned:
            self._free = min(self._free, PATTERNED)
        self._union = told.union if told is not None else 0

    def require_bounded(self) -> None:
        """Raises ``InvalidManifest`` for a schema of which a single argument would take too long."""
        if self._expansion is not None and self._expansion.checks[:2][-1] > CHECKS:
            raise InvalidManifest(
                f"the function's input_schema may make more than {CHECKS} comparisons for one argument: its parts name"
                " each other too often; give simpler type hints, deploy again",
                field="handler.input_schema",
            )

    async def check(self, body: bytes) -> bytes:
        """The body to hand on (``{}`` for none). Raises ``MalformedJson`` or ``InvalidArgument`` with the path."""
        body = given(body)
        if len(body) > IN_THREAD_BYTES:
            await asyncio.to_thread(self.check_now, body)
        else:
            self.check_now(body)
        return body

    def check_now(self, body: bytes) -> None:
        """As ``check``, at once."""
        self._check_value(parse(body), body)

    def _check_value(self, value: Any, body: bytes) -> None:
        if not isinstance(value, dict):
            raise InvalidArgument(f"the body must be a JSON object of arguments, not {_json_type(value)}")
        most = min(MOST_CHECKS, CHECKS + CHECKS_A_BYTE * len(body))
        if (len(body) > self._free and not self._takes(most, value, body)) or self._validator.is_valid(value):
            return
        if not self._is_small(value, body) or (self._union > EXPLAINED and not self._takes(EXPLAINED, value, body)):
            raise InvalidArgument(_WRONG)
        try:
            self._validator.validate(value)  # which stops at the first error: there may be one of each item
        except jsonschema_rs.ValidationError as error:
            raise _explain(error) from None
        except ValueError as error:  # what is wrong is nested more deeply than an error can say
            raise InvalidArgument(_WRONG) from error

    def _is_small(self, value: Any, body: bytes) -> bool:
        """Whether what is wrong of ``value``, which is ``body``, has room: it is there once for each branch beside."""
        told = self._expansion
        if told is None or len(body) * told.copies() <= EXPLAINED_BYTES:
            return len(body) <= EXPLAINED_BYTES
        values = body.count(b",") + body.count(b"{") + body.count(b"[")  # or fewer
        return values <= _LOOKED_AT and len(body) * told.copies(extent(value)[1]) <= EXPLAINED_BYTES

    def _takes(self, most: int, value: Any, body: bytes) -> bool:
        """Whether to check ``value``, which is ``body``, takes ``most`` comparisons at most, as far as can be told."""
        if self._expansion is None or (self._expansion.patterned and len(body) > PATTERNED):
            return False
        values = body.count(b",") + body.count(b"{") + body.count(b"[")  # or fewer
        if self._expansion.cost(values) <= most:
            return True
        return values <= _LOOKED_AT and self._expansion.cost(*extent(value)) <= most


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
