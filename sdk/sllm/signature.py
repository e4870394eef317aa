"""From a user's function to its call's JSON Schema and kind, by its type hints alone. Nothing of it is run."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from enum import Flag
from typing import Any, Final, get_type_hints

from pydantic import ConfigDict, Field, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from sllm_runtime.protocol.arguments import base, further
from sllm_runtime.protocol.errors import InvalidManifest
from sllm_runtime.protocol.manifest import MODEL_PARAMETER, HandlerKind

_NO_SCHEMA: Final = (PydanticSchemaGenerationError, PydanticUserError, TypeError)
"""What a type raises of which pydantic can make none."""


def call_target(target: Any) -> Callable[..., Any]:
    """What a call runs: the function itself, or a class's ``__call__``. Raises ``InvalidManifest``."""
    if inspect.isclass(target):
        method = next((base.__dict__["__call__"] for base in target.__mro__ if "__call__" in base.__dict__), None)
        if not inspect.isfunction(method):
            raise InvalidManifest(
                f"class {target.__qualname__} has no __call__ method: add `def __call__(self, ...)`, which a call runs"
            )
        return _unwrapped(method)
    if not inspect.isfunction(target):
        raise InvalidManifest(
            f"@model_function stands on {type(target).__name__} {target!r:.80}; it goes on a function or a class"
        )
    return _unwrapped(target)


def _unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, where what it wraps has an end. Raises ``InvalidManifest``."""
    try:
        inspect.unwrap(function)
    except ValueError as error:  # ``typing.get_type_hints`` would follow it without end
        text = f"{function.__qualname__}: {error}; a decorator has set its __wrapped__ to itself"
        raise InvalidManifest(text) from error
    return function


def parameters(target: Any) -> list[inspect.Parameter]:
    """Parameters of a call's arguments; the model (and ``self``) is none of them."""
    found = list(inspect.signature(call_target(target)).parameters.values())
    return [each for each in (found[1:] if inspect.isclass(target) else found) if each.name != MODEL_PARAMETER]


def named(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Positional arguments by their names. Raises ``TypeError`` as a call of ``target`` would."""
    expected = parameters(target)
    bound = inspect.Signature(expected).bind(*args, **kwargs)
    extra = next((each.name for each in expected if each.kind is each.VAR_KEYWORD), None)
    given = {key: value for key, value in bound.arguments.items() if key != extra}
    return {**given, **bound.arguments.get(extra or "", {})}


def handler_kind(target: Any) -> HandlerKind:
    """How the worker runs ``target``."""
    if inspect.isclass(target):
        return "class"
    if inspect.isasyncgenfunction(target):
        return "async_generator"
    if inspect.iscoroutinefunction(target):
        return "async_function"
    return "generator" if inspect.isgeneratorfunction(target) else "function"


_ITERATES = (
    typing.get_origin(typing.Iterator[int]),
    typing.get_origin(typing.AsyncIterator[int]),
    typing.get_origin(typing.Generator[int, None, None]),
    typing.get_origin(typing.AsyncGenerator[int, None]),
)


def streams(target: Any) -> bool:
    """Whether a call yields values: a generator, or a function annotated to return an iterator."""
    function = call_target(target)
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return True
    returned = _hints(function).get("return")
    return typing.get_origin(returned) in _ITERATES or returned in _ITERATES


def input_schema(target: Any) -> dict[str, Any]:
    """JSON Schema of the keyword arguments. The parameter ``model`` (and ``self``) is none of them.

    Raises ``InvalidManifest`` for positional-only or ``*args`` parameters and for hints that JSON cannot carry.
    """
    function = call_target(target)
    hints = _hints(function)
    fields: dict[str, Any] = {}
    extra: Any = None
    for parameter in parameters(target):
        if parameter.kind is parameter.VAR_KEYWORD:
            extra = further(hints.get(parameter.name, Any))
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            raise InvalidManifest(
                f"{function.__qualname__}: parameter '{parameter.name}' is positional only; calls carry named arguments"
            )
        else:
            default = ... if parameter.default is parameter.empty else parameter.default
            # An alias lets any Python name be a field, also those pydantic keeps for itself.
            field = Field(default=default, alias=parameter.name)
            fields[f"p_{len(fields)}"] = (hints.get(parameter.name, Any), field)
    filled = set(inspect.signature(function).parameters) - {each.name for each in parameters(target)}
    return _schema(function, fields, extra, sorted(filled))


class _Schemas(GenerateJsonSchema):
    """Pydantic's, but that flags come together, too."""

    def enum_schema(self, schema: core_schema.EnumSchema) -> JsonSchemaValue:
        found = super().enum_schema(schema)
        return {"title": found.get("title", ""), "type": "integer"} if issubclass(schema["cls"], Flag) else found


def _schema(function: Callable[..., Any], fields: dict[str, Any], extra: Any, filled: list[str]) -> dict[str, Any]:
    """``extra``: the type of further names, where these are taken. ``filled``: parameters that the platform fills in,
    which are none of them."""
    config = ConfigDict(extra="forbid" if extra is None else "allow", title=function.__name__)
    try:
        model: Any = create_model("Arguments", __base__=base(config, extra), **fields)
        schema: dict[str, Any] = model.model_json_schema(by_alias=True, schema_generator=_Schemas)
    except _NO_SCHEMA as error:
        does = "hint what does: JSON types (list for an array), dataclasses, TypedDicts or pydantic models"
        if not isinstance(error, PydanticSchemaGenerationError | PydanticInvalidForJsonSchema | TypeError):
            does = str(error).splitlines()[0].removesuffix(".")  # of a kind that does: what is to be done about it
        raise InvalidManifest(
            f"{function.__qualname__}: {_culprit(fields, extra)} cannot come as JSON; {does}"
        ) from error
    if extra in (None, Any):
        schema["additionalProperties"] = extra is not None
    if extra is not None and filled:
        schema["properties"] = {**schema.get("properties", {}), **{name: {"not": {}} for name in filled}}
    return schema


def _culprit(fields: dict[str, Any], extra: Any) -> str:
    """The parameter whose type alone makes no schema, and the type."""
    for hint, field in fields.values():
        try:
            create_model("Argument", __base__=base(ConfigDict(), None), p=(hint, ...)).model_json_schema(
                schema_generator=_Schemas
            )
        except _NO_SCHEMA:
            return f"the type of parameter '{field.alias}', {inspect.formatannotation(hint)},"
    return f"the type of further arguments, {inspect.formatannotation(extra)}," if extra else "an argument's type"


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise InvalidManifest(f"{function.__qualname__}: its type hints cannot be resolved: {error}") from error
