"""A call's body to keyword arguments, by the function's type hints."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import PydanticSerializationError, to_json

from sllm_runtime.protocol.arguments import base, further
from sllm_runtime.protocol.errors import InvalidArgument, InvalidRequest, MalformedJson
from sllm_runtime.protocol.manifest import MODEL_PARAMETER

_MISSING = "missing"
_EXTRA = "extra_forbidden"
_NO_JSON = "json_invalid"
_UNKNOWN = "there is no argument '{}'"


class Arguments:
    """Built once for a function, used for each call. Raises what pydantic raises for hints it cannot use."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints = get_type_hints(function, include_extras=True)
        fields: dict[str, Any] = {}
        self._names: dict[str, str] = {}
        extra: Any = None
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                extra = further(hints.get(parameter.name, Any))
            elif parameter.name != MODEL_PARAMETER:
                default = ... if parameter.default is parameter.empty else parameter.default
                # An alias lets any Python name be a field, also those pydantic keeps for itself.
                key = f"p_{len(fields)}"
                self._names[key] = parameter.name
                fields[key] = (hints.get(parameter.name, Any), Field(default=default, alias=parameter.name))
        config = ConfigDict(extra="forbid" if extra is None else "allow", arbitrary_types_allowed=True)
        self._model: type[BaseModel] = create_model("Arguments", __base__=base(config, extra), **fields)
        self._given = _given(function)
        """Parameters that no caller fills in: ``**kwargs`` would take their names."""

    def parse(self, body: bytes) -> dict[str, Any]:
        """Keyword arguments in the JSON object ``body`` (empty: none).

        Raises ``MalformedJson``, ``InvalidRequest`` if it is no object, ``InvalidArgument`` with the field's path.
        """
        try:
            given = msgspec.json.decode(body) if body.strip() else {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedJson(f"the body is not JSON: {error}") from error
        if not isinstance(given, dict):
            raise InvalidRequest(f"the body is a JSON {type(given).__name__}; send an object of keyword arguments")
        return self.convert(given)

    def convert(self, given: dict[str, Any]) -> dict[str, Any]:
        """``given`` converted to the hinted types. Raises ``InvalidArgument``."""
        if taken := next((name for name in given if name in self._given), None):
            raise InvalidArgument(_UNKNOWN.format(taken), field=taken)
        try:
            record = self._model.model_validate(given)
        except ValidationError as error:
            try:  # what takes no other type's values (``strict``) takes what JSON has for its own
                record = self._model.model_validate_json(to_json(given))
            except (PydanticSerializationError, UnicodeError):
                raise _refused(error, given) from error
            except ValidationError as other:
                if other.errors(include_url=False)[0]["type"] == _NO_JSON:  # too deep for pydantic alone
                    raise _refused(error, given) from error
                raise _refused(min(error, other, key=ValidationError.error_count), given) from error
        values = {name: getattr(record, key) for key, name in self._names.items() if key in record.model_fields_set}
        return values | (record.model_extra or {})


def _given(function: Callable[..., Any]) -> frozenset[str]:
    found = [MODEL_PARAMETER] if MODEL_PARAMETER in inspect.signature(function).parameters else []
    if inspect.ismethod(function):
        found += itertools.islice(inspect.signature(function.__func__).parameters, 1)  # its object
    return frozenset(found)


def _refused(error: ValidationError, given: dict[str, Any]) -> InvalidArgument:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in _place(first["loc"], given, lacks=first["type"] == _MISSING))
    if first["type"] == _MISSING:
        text = f"argument '{path}' is missing"
    elif first["type"] == _EXTRA:
        text = _UNKNOWN.format(path)
    else:
        text = f"argument '{path}': {first['msg']} (given: {first['input']!r:.80})"
    more = error.error_count() - 1
    return InvalidArgument(text + (f", and {more} more" if more else ""), field=path)


def _place(loc: tuple[int | str, ...], given: Any, *, lacks: bool) -> Iterator[int | str]:
    """Without pydantic's names for the members of a union: where in ``given`` it is, or what lacks there."""
    for number, part in enumerate(loc, 1):
        within = range(len(given)) if isinstance(given, list) else given if isinstance(given, dict) else ()
        if part in within:
            given = given[part]
            yield part
        elif lacks and number == len(loc):
            yield part
