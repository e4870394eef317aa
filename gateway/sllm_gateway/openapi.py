"""The OpenAPI document, made from the models that the routes use."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sllm_gateway.openai.requests import ChatRequest, CompletionRequest
from sllm_runtime.protocol import http
from sllm_runtime.protocol.http import API


@dataclass(frozen=True)
class Operation:
    """One method of one path. ``events``: the answer is SSE, and ``answer`` is in its ``done`` event or each data."""

    method: str
    path: str
    summary: str
    takes: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    events: bool = False
    status: int = 200


OPERATIONS = (
    Operation("post", "/fn/{name}", "Call a function: keyword arguments in, its value (or SSE of values) out"),
    Operation("post", "/fn/{name}/{version}", "Call one version, v<n>"),
    Operation("post", "/v1/completions", "OpenAI's completions", CompletionRequest),
    Operation("post", "/v1/chat/completions", "OpenAI's chat completions", ChatRequest),
    Operation("get", "/v1/models", "Functions that the OpenAI routes serve"),
    Operation("get", "/v1/models/{model}", "One of them"),
    Operation("get", f"{API}/functions", "All functions", answer=http.FunctionListView),
    Operation(
        "post", f"{API}/functions", "Deploy a bundle that was put before", http.DeployRequest, http.DeployResult,
        events=True,
    ),
    Operation(
        "delete", f"{API}/deployments/{{request}}", "Undo a deployment that goes on", answer=http.WithdrawnView
    ),
    Operation("get", f"{API}/functions/{{name}}", "One function", answer=http.FunctionView),
    Operation("delete", f"{API}/functions/{{name}}", "Delete a function; force cancels what runs", query=("force",)),
    Operation(
        "post", f"{API}/functions/{{name}}/rollback", "Give the route back", http.RollbackRequest, http.FunctionView
    ),
    Operation(
        "get", f"{API}/functions/{{name}}/logs", "A function's log", answer=http.LogView,
        query=("follow", "call", "limit", "since"), events=True,
    ),
    Operation("get", f"{API}/events", "What happened", query=("follow", "function", "limit", "since"), events=True),
    Operation("head", f"{API}/bundles/{{digest}}", "Whether a bundle is stored"),
    Operation("put", f"{API}/bundles/{{digest}}", "Store a bundle by its sha-256", answer=http.BundleView, status=201),
    Operation("get", f"{API}/models", "All models", answer=http.ModelListView),
    Operation("post", f"{API}/models", "Register a model", http.ModelRegisterRequest, http.ModelView, events=True),
    Operation("get", f"{API}/models/{{digest}}", "One model", answer=http.ModelView),
    Operation("delete", f"{API}/models/{{digest}}", "Delete a model that no version uses", answer=http.ModelView),
    Operation("post", f"{API}/models/{{digest}}/validate", "Check every byte of a model", answer=http.ModelView),
    Operation("get", f"{API}/nodes", "All nodes", answer=http.NodeListView),
    Operation("get", f"{API}/status", "What is there", answer=http.StatusView),
    Operation("get", f"{API}/openapi.json", "This document"),
    Operation("get", "/livez", "Whether the process lives"),
    Operation("get", "/readyz", "Whether calls can be served"),
    Operation("get", "/metrics", "Prometheus metrics"),
)  # fmt: skip


@cache
def document() -> dict[str, Any]:
    """OpenAPI 3.1."""
    models = {m for o in OPERATIONS for m in (o.takes, o.answer) if m is not None} | {http.ErrorEnvelope}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "serialization") for model in ordered], ref_template="#/components/schemas/{model}"
    )
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
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


def _operation(operation: Operation) -> dict[str, Any]:
    media = http.EVENT_STREAM if operation.events else "application/json"
    content = {"content": {media: {"schema": _ref(operation.answer)}}} if operation.answer else {}
    error = {"description": "an error", "content": {"application/json": {"schema": _ref(http.ErrorEnvelope)}}}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": [
            *[_parameter(part[1:-1], "path") for part in operation.path.split("/") if part.startswith("{")],
            *[_parameter(name, "query") for name in operation.query],
        ],
        "responses": {str(operation.status): {"description": "success", **content}, "default": error},
    }
    if operation.takes is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _ref(operation.takes)}},
        }
    if operation.path in ("/livez", "/readyz", "/metrics"):
        described["security"] = []
    return described


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _parameter(name: str, place: str) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
