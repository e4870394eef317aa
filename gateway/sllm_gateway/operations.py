"""Every method of every path that the gateway serves, as the OpenAPI document names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pydantic import BaseModel

from sllm_gateway.parameters import CALLS, READS_ON
from sllm_runtime.protocol import http
from sllm_runtime.protocol.http import API
from sllm_runtime.protocol.openai_requests import ChatRequest, CompletionRequest

JSON: Final = ("application/json",)
TEXT: Final = ("text/plain",)
EVENTS: Final = (http.EVENT_STREAM,)
EITHER: Final = JSON + EVENTS
"""SSE for who accepts it; then the JSON is that of its ``done`` event, or each value an event."""
KEPT: Final = (200, 202)
"""202: who prefers ``respond-async`` is promised it."""


@dataclass(frozen=True)
class Operation:
    """One method of one path. ``name``: of it in clients that are made from the document. ``raw``: the media type of a
    body that is none of our models; ``statuses``: of success, of which 202 has ``later``. ``more``: what is answered
    instead where the query wants it."""

    method: str
    path: str
    name: str
    summary: str
    takes: type[BaseModel] | None = None
    answer: type[BaseModel] | None = None
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    media: tuple[str, ...] = JSON
    statuses: tuple[int, ...] = (200,)
    raw: str = ""
    later: type[BaseModel] | None = None
    more: type[BaseModel] | None = None


OPERATIONS: Final = (
    Operation(
        "post",
        "/fn/{name}",
        "call_function",
        "Call a function: keyword arguments in, its value (or SSE of values) out",
        media=EITHER,
        raw=JSON[0],
        statuses=KEPT,
        later=http.PromisedView,
        headers=CALLS,
    ),
    Operation(
        "post",
        "/fn/{name}/{version}",
        "call_version",
        "Call one version, v<n>",
        media=EITHER,
        raw=JSON[0],
        statuses=KEPT,
        later=http.PromisedView,
        headers=CALLS,
    ),
    Operation(
        "post",
        "/v1/completions",
        "create_completion",
        "OpenAI's completions",
        CompletionRequest,
        media=EITHER,
        statuses=KEPT,
        later=http.PromisedView,
        headers=CALLS,
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "create_chat_completion",
        "OpenAI's chat completions",
        ChatRequest,
        media=EITHER,
        statuses=KEPT,
        later=http.PromisedView,
        headers=CALLS,
    ),
    Operation("get", "/v1/models", "list_openai_models", "Functions that the OpenAI routes serve"),
    Operation("get", "/v1/models/{model}", "get_openai_model", "One of them"),
    Operation(
        "get",
        http.CALLS,
        "list_calls",
        "Calls that are kept, the newest first",
        answer=http.CallListView,
        query=("function", "state", "limit", "after"),
    ),
    Operation("get", f"{http.CALLS}/{{call}}", "get_call", "One of them, with its result", answer=http.CallView),
    Operation(
        "get",
        f"{http.CALLS}/{{call}}/events",
        "read_call_events",
        "Its stream, from after Last-Event-ID",
        media=EVENTS,
        headers=READS_ON,
    ),
    Operation(
        "post",
        f"{http.CALLS}/{{call}}/cancel",
        "cancel_call",
        "End a call, kept or not",
        answer=http.CancelledView,
        statuses=(202,),
    ),
    Operation("get", f"{API}/functions", "list_functions", "All functions", answer=http.FunctionListView),
    Operation(
        "post",
        f"{API}/functions",
        "deploy_function",
        "Deploy a bundle that was put before",
        http.DeployRequest,
        http.DeployResult,
        media=EITHER,
    ),
    Operation(
        "delete",
        f"{API}/deployments/{{request}}",
        "withdraw_deployment",
        "Undo a deployment that goes on",
        answer=http.WithdrawnView,
    ),
    Operation("get", f"{API}/functions/{{name}}", "get_function", "One function", answer=http.FunctionView),
    Operation(
        "delete",
        f"{API}/functions/{{name}}",
        "delete_function",
        "Delete a function; force cancels what runs. 202: calls still run",
        answer=http.DeletedView,
        query=("force", "begun"),
        statuses=(200, 202),
    ),
    Operation(
        "post",
        f"{API}/functions/{{name}}/rollback",
        "rollback_function",
        "Give the route back",
        http.RollbackRequest,
        http.FunctionView,
    ),
    Operation(
        "post",
        f"{API}/functions/{{name}}/warmup",
        "warm_function",
        "Have instances before a call. 202: not yet, ask again",
        http.WarmupRequest,
        http.WarmView,
        statuses=(200, 202),
    ),
    Operation(
        "get",
        f"{API}/functions/{{name}}/logs",
        "read_function_log",
        "A function's log",
        answer=http.LogView,
        query=("follow", "call", "limit", "since", "ago"),
        headers=READS_ON,
        media=EVENTS,
    ),
    Operation(
        "get",
        f"{API}/events",
        "read_events",
        "What happened",
        query=("follow", "function", "call", "kind", "limit", "since", "ago"),
        headers=READS_ON,
        media=EVENTS,
    ),
    Operation("head", f"{API}/bundles/{{digest}}", "has_bundle", "Whether a bundle is stored", media=()),
    Operation(
        "put",
        f"{API}/bundles/{{digest}}",
        "put_bundle",
        "Store a bundle by its sha-256",
        answer=http.BundleView,
        statuses=(201,),
        raw="application/octet-stream",
    ),
    Operation("get", f"{API}/models", "list_models", "All models", answer=http.ModelListView),
    Operation(
        "post",
        f"{API}/models",
        "register_model",
        "Register a model",
        http.ModelRegisterRequest,
        http.ModelView,
        media=EITHER,
    ),
    Operation("get", f"{API}/models/{{digest}}", "get_model", "One model", answer=http.ModelView),
    Operation(
        "delete",
        f"{API}/models/{{digest}}",
        "delete_model",
        "Delete a model that no version uses",
        answer=http.ModelView,
    ),
    Operation(
        "post",
        f"{API}/models/{{digest}}/validate",
        "validate_model",
        "Check every byte of a model",
        answer=http.ModelView,
    ),
    Operation("get", f"{API}/placement", "get_placement", "Where models should lie, and do", answer=http.PlacementView),
    Operation("post", f"{API}/placement", "redo_placement", "Decide anew where models lie", answer=http.PlacementView),
    Operation(
        "post",
        f"{API}/models/{{digest}}/pull",
        "pull_model",
        "Bring a model to the disks of nodes",
        http.PullRequest,
        http.ModelView,
        media=EITHER,
    ),
    Operation(
        "post",
        f"{API}/instances/{{instance}}/migrate",
        "migrate_instance",
        "Move an instance's running calls. 202: it still goes on",
        http.MigrateRequest,
        http.MigrationView,
        statuses=(200, 202),
    ),
    Operation(
        "get",
        f"{API}/nodes",
        "list_nodes",
        "All nodes",
        answer=http.NodeListView,
        more=http.NodeDetailListView,
        query=("detail",),
    ),
    Operation(
        "get", f"{API}/nodes/{{node}}", "get_node", "One node, and what lies where on it", answer=http.NodeDetailView
    ),
    Operation(
        "delete", f"{API}/nodes/{{node}}", "forget_node", "Forget a node that has gone", answer=http.NodeForgottenView
    ),
    Operation(
        "post",
        f"{API}/nodes/{{node}}/{{wish}}",
        "cordon_node",
        "cordon, uncordon or drain a node",
        answer=http.NodeView,
    ),
    Operation("get", f"{API}/secrets", "list_secrets", "All secrets, without their values", answer=http.SecretListView),
    Operation(
        "put",
        f"{API}/secrets/{{name}}",
        "put_secret",
        "Store a secret for functions",
        http.SecretRequest,
        http.SecretView,
    ),
    Operation(
        "delete",
        f"{API}/secrets/{{name}}",
        "delete_secret",
        "Forget a secret that no function needs",
        answer=http.SecretDeletedView,
    ),
    Operation(
        "get",
        f"{API}/explain/{{what}}",
        "explain",
        "Why a function or a call runs, or ran, where it does",
        answer=http.ExplainView,
    ),
    Operation("get", f"{API}/status", "get_status", "What is there", answer=http.StatusView),
    Operation("get", f"{API}/openapi.json", "get_openapi", "This document"),
    Operation("get", "/livez", "livez", "Whether the process lives", media=TEXT),
    Operation("get", "/readyz", "readyz", "Whether calls can be served"),
    Operation("get", "/metrics", "metrics", "Prometheus metrics", media=TEXT),
)
