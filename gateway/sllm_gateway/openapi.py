"""The OpenAPI document, made from the models that the routes use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sllm_gateway import auth, parameters
from sllm_gateway.operations import JSON, OPERATIONS, Operation
from sllm_runtime.protocol import http

Schema: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["validation", "serialization"]

_OPENAI_ERROR: Final = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1. What is taken is described as it is checked, what is answered as it is written."""
    wanted: set[tuple[type[BaseModel], Mode]] = {(http.ErrorEnvelope, "serialization")}
    wanted |= {(operation.takes, "validation") for operation in OPERATIONS if operation.takes is not None}
    answers = (answer for operation in OPERATIONS for answer in (operation.answer, operation.more, operation.later))
    wanted |= {(answer, "serialization") for answer in answers if answer is not None}
    ordered = sorted(wanted, key=lambda each: (each[0].__name__, each[1]))
    refs, schemas = models_json_schema(ordered, ref_template="#/components/schemas/{model}")
    taken = {model: ref for (model, mode), ref in refs.items() if mode == "validation"}
    answered = {model: ref for (model, mode), ref in refs.items() if mode == "serialization"}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, taken, answered)
    return {
        "openapi": "3.1.0",
        "info": {"title": "sllm", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": schemas.get("$defs", {}),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"bearer": []}],
    }


def _operation(operation: Operation, taken: Mapping[Any, Schema], answered: Mapping[Any, Schema]) -> Schema:
    openai = operation.path.startswith("/v1/") and not operation.path.startswith(http.CALLS)
    error = _OPENAI_ERROR if openai else answered[http.ErrorEnvelope]
    described: dict[str, Any] = {
        "operationId": operation.name,
        "summary": operation.summary,
        "parameters": [
            *parameters.of_path(operation.path),
            *[parameters.of_query(operation.path, name) for name in operation.query],
            *[parameters.of_header(name) for name in operation.headers],
        ],
        "responses": {
            **{str(status): _success(operation, status, answered) for status in operation.statuses},
            "default": {"description": "an error", "content": {JSON[0]: {"schema": error}}},
        },
    }
    if operation.takes is not None:
        described["requestBody"] = {
            "required": _needed(operation.takes),
            "content": {JSON[0]: {"schema": taken[operation.takes]}},
        }
    elif operation.raw:
        described["requestBody"] = {"content": {operation.raw: {"schema": _raw(operation.raw)}}}
    if operation.path.encode() in auth.OPEN:
        described["security"] = []
    return described


def _needed(body: type[BaseModel]) -> bool:
    """Whether it may not be left out: no body is an empty one."""
    return any(field.is_required() for field in body.model_fields.values())


def _success(operation: Operation, status: int, answered: Mapping[Any, Schema]) -> Schema:
    if status == 202 and operation.later is not None:
        return {"description": "promised", "content": {JSON[0]: {"schema": answered[operation.later]}}}
    content = {media: {"schema": _answer(operation, media, answered)} for media in operation.media}
    return {"description": "success", **({"content": content} if content else {})}


def _answer(operation: Operation, media: str, answered: Mapping[Any, Schema]) -> Schema:
    """OpenAPI has no word for the events of a stream: it is a text, of which the summary says more."""
    if media not in JSON:
        return {"type": "string"}
    shapes = [answered[shape] for shape in (operation.answer, operation.more) if shape is not None]
    return {"anyOf": shapes} if len(shapes) > 1 else shapes[0] if shapes else {}


def _raw(media: str) -> Schema:
    """Named arguments, or bytes."""
    return {"type": "object"} if media in JSON else {"type": "string", "format": "binary"}
