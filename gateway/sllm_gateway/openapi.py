"""The OpenAPI document, made from the models that the routes use."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, Literal, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sllm_runtime.protocol import http
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.openai_requests import ChatRequest, CompletionRequest

Schema: TypeAlias = dict[str, Any]
Mode: TypeAlias = Literal["validation", "serialization"]
JSON: Final = ("application/json",)
TEXT: Final = ("text/plain",)
EVENTS: Final = (http.EVENT_STREAM,)
EITHER: Final = JSON + EVENTS
"""SSE for who accepts it; then the JSON is that of its ``done`` event, or each value an event."""
TYPES: Final = {"follow": "boolean", "begun": "boolean", "force": "boolean", "limit": "integer", "since": "number"}
OPEN: Final = ("/livez", "/readyz", "/metrics")


@dataclass(frozen=True)
class Operation:
    """One method of one path. ``raw``: the media type of a body that is none of our models."""

    method: str
    path: str
    summary: str
    takes: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    media: tuple[str, ...] = JSON
    statuses: tuple[int, ...] = (200,)
    raw: str = ""


OPERATIONS = (
    Operation(
        "post", "/fn/{name}", "Call a function: keyword arguments in, its value (or SSE of values) out",
        media=EITHER, raw=JSON[0],
    ),
    Operation("post", "/fn/{name}/{version}", "Call one version, v<n>", media=EITHER, raw=JSON[0]),
    Operation("post", "/v1/completions", "OpenAI's completions", CompletionRequest, media=EITHER),
    Operation("post", "/v1/chat/completions", "OpenAI's chat completions", ChatRequest, media=EITHER),
    Operation("get", "/v1/models", "Functions that the OpenAI routes serve"),
    Operation("get", "/v1/models/{model}", "One of them"),
    Operation(
        "get", http.CALLS, "Calls that are kept, the newest first", answer=http.CallListView,
        query=("function", "state", "limit", "after"),
    ),
    Operation("get", f"{http.CALLS}/{{call}}", "One of them, with its result", answer=http.CallView),
    Operation(
        "get", f"{http.CALLS}/{{call}}/events", "Its stream, from after Last-Event-ID", media=EVENTS
    ),
    Operation(
        "post", f"{http.CALLS}/{{call}}/cancel", "End a call, kept or not", answer=http.CancelledView, statuses=(202,)
    ),
    Operation("get", f"{API}/functions", "All functions", answer=http.FunctionListView),
    Operation(
        "post", f"{API}/functions", "Deploy a bundle that was put before", http.DeployRequest, http.DeployResult,
        media=EITHER,
    ),
    Operation(
        "delete", f"{API}/deployments/{{request}}", "Undo a deployment that goes on", answer=http.WithdrawnView
    ),
    Operation("get", f"{API}/functions/{{name}}", "One function", answer=http.FunctionView),
    Operation(
        "delete", f"{API}/functions/{{name}}", "Delete a function; force cancels what runs. 202: calls still run",
        answer=http.DeletedView, query=("force", "begun"), statuses=(200, 202),
    ),
    Operation(
        "post", f"{API}/functions/{{name}}/rollback", "Give the route back", http.RollbackRequest, http.FunctionView
    ),
    Operation(
        "post", f"{API}/functions/{{name}}/warmup", "Have instances before a call. 202: not yet, ask again",
        http.WarmupRequest, http.WarmView, statuses=(200, 202),
    ),
    Operation(
        "get", f"{API}/functions/{{name}}/logs", "A function's log", answer=http.LogView,
        query=("follow", "call", "limit", "since"), media=EVENTS,
    ),
    Operation(
        "get", f"{API}/events", "What happened",
        query=("follow", "function", "call", "kind", "limit", "since"), media=EVENTS,
    ),
    Operation("head", f"{API}/bundles/{{digest}}", "Whether a bundle is stored", media=()),
    Operation(
        "put", f"{API}/bundles/{{digest}}", "Store a bundle by its sha-256", answer=http.BundleView, statuses=(201,),
        raw="application/octet-stream",
    ),
    Operation("get", f"{API}/models", "All models", answer=http.ModelListView),
    Operation("post", f"{API}/models", "Register a model", http.ModelRegisterRequest, http.ModelView, media=EITHER),
    Operation("get", f"{API}/models/{{digest}}", "One model", answer=http.ModelView),
    Operation("delete", f"{API}/models/{{digest}}", "Delete a model that no version uses", answer=http.ModelView),
    Operation("post", f"{API}/models/{{digest}}/validate", "Check every byte of a model", answer=http.ModelView),
    Operation("get", f"{API}/placement", "Where models should lie, and do", answer=http.PlacementView),
    Operation("post", f"{API}/placement", "Decide anew where models lie", answer=http.PlacementView),
    Operation(
        "post", f"{API}/models/{{digest}}/pull", "Bring a model to the disks of nodes", http.PullRequest,
        http.ModelView, media=EITHER,
    ),
    Operation(
        "post", f"{API}/instances/{{instance}}/migrate", "Move an instance's running calls. 202: it still goes on",
        http.MigrateRequest, http.MigrationView, statuses=(200, 202),
    ),
    Operation("get", f"{API}/nodes", "All nodes", answer=http.NodeListView, query=("detail",)),
    Operation("get", f"{API}/nodes/{{node}}", "One node, and what lies where on it", answer=http.NodeDetailView),
    Operation("delete", f"{API}/nodes/{{node}}", "Forget a node that has gone", answer=http.NodeForgottenView),
    Operation(
        "post", f"{API}/nodes/{{node}}/{{wish}}", "cordon, uncordon or drain a node", answer=http.NodeView
    ),
    Operation("get", f"{API}/secrets", "All secrets, without their values", answer=http.SecretListView),
    Operation(
        "put", f"{API}/secrets/{{name}}", "Store a secret for functions", http.SecretRequest, http.SecretView
    ),
    Operation(
        "delete", f"{API}/secrets/{{name}}", "Forget a secret that no function needs", answer=http.SecretDeletedView
    ),
    Operation("get", f"{API}/explain/{{what}}", "Why a function or a call runs, or ran, where it does",
              answer=http.ExplainView),
    Operation("get", f"{API}/status", "What is there", answer=http.StatusView),
    Operation("get", f"{API}/openapi.json", "This document"),
    Operation("get", "/livez", "Whether the process lives", media=TEXT),
    Operation("get", "/readyz", "Whether calls can be served"),
    Operation("get", "/metrics", "Prometheus metrics", media=TEXT),
)  # fmt: skip


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
    wanted |= {(operation.answer, "serialization") for operation in OPERATIONS if operation.answer is not None}
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
    content = {media: {"schema": _answer(operation, media, answered)} for media in operation.media}
    success = {"description": "success", **({"content": content} if content else {})}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            *[_parameter(part[1:-1], "path") for part in operation.path.split("/") if part.startswith("{")],
            *[_parameter(name, "query") for name in operation.query],
        ],
        "responses": {
            **{str(status): success for status in operation.statuses},
            "default": {"description": "an error", "content": {JSON[0]: {"schema": error}}},
        },
    }
    if operation.takes is not None:
        described["requestBody"] = {"required": True, "content": {JSON[0]: {"schema": taken[operation.takes]}}}
    elif operation.raw:
        described["requestBody"] = {"content": {operation.raw: {"schema": _raw(operation.raw)}}}
    if operation.path in OPEN:
        described["security"] = []
    return described


def _answer(operation: Operation, media: str, answered: Mapping[Any, Schema]) -> Schema:
    """OpenAPI has no word for the events of a stream: it is a text, of which the summary says more."""
    if media not in JSON:
        return {"type": "string"}
    return answered[operation.answer] if operation.answer is not None else {}


def _raw(media: str) -> Schema:
    """Named arguments, or bytes."""
    return {"type": "object"} if media in JSON else {"type": "string", "format": "binary"}


def _parameter(name: str, place: str) -> Schema:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": TYPES.get(name, "string")}}
