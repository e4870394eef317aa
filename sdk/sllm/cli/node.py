"""``sllm node``: the cluster's nodes, and what an operator decides about them."""

from __future__ import annotations

import math
import time
from typing import Annotated

import typer

from sllm import transport
from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm_runtime.protocol.errors import Conflict, DeadlineExceeded, SllmError, Unavailable
from sllm_runtime.protocol.http import API, NodeDetailView, NodeForgottenView, NodeListView, NodeView

Name = Annotated[str, typer.Argument(help="The node's name.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Until nothing runs there; or say it and return.")]
Timeout = Annotated[
    float | None,
    typer.Option("--timeout", min=0, help="Seconds to wait at most; then exit status 5."),
]
POLL_S = 0.25
UNHEARD_S = 15.0
"""A node that is not heard for so long is not waited for: a controller that has just taken over has heard of none."""

app = typer.Typer(
    help="Look at the cluster's nodes, take them out of use.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)


@app.callback()
def root() -> None:
    """Look at the cluster's nodes, take them out of use."""


@app.command("list")
def list_(context: typer.Context, json: Json = False) -> None:
    """All nodes, with what is free on them."""
    with client(context) as connection:
        found = NodeListView.model_validate(connection.request("GET", f"{API}/nodes"))
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        show.nodes(found.nodes)


@app.command()
def describe(
    context: typer.Context, name: Annotated[str, typer.Argument(help="The node's name.")], json: Json = False
) -> None:
    """Say what a node is doing: which models lie in which tier, and how fast each way to them is."""
    path = _path(name)
    with client(context) as connection:
        found = NodeDetailView.model_validate(connection.request("GET", path))
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        show.node(found)


def _path(name: str) -> str:
    return f"{API}/nodes/{transport.segment(name, 'node')}"


def _wish(context: typer.Context, name: str, wish: str) -> NodeView:
    path = f"{_path(name)}/{wish}"
    with client(context) as connection:
        return NodeView.model_validate(connection.request("POST", path))


def _said(found: NodeView, word: str, json: bool) -> None:
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        output.text(f"{found.node} {word}")


@app.command()
def cordon(context: typer.Context, name: Name, json: Json = False) -> None:
    """Start nothing on a node from now on; what runs there goes on."""
    _said(_wish(context, name, "cordon"), "is cordoned", json)


@app.command()
def uncordon(context: typer.Context, name: Name, json: Json = False) -> None:
    """Use a node again that was cordoned or drained."""
    _said(_wish(context, name, "uncordon"), "is in use", json)


@app.command()
def forget(context: typer.Context, name: Name, json: Json = False) -> None:
    """Strike a node off the list that has gone for good: nothing was heard of it for some seconds."""
    path = _path(name)
    with client(context) as connection:
        found = NodeForgottenView.model_validate(connection.request("DELETE", path))
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        output.text(f"{found.node} is forgotten")


@app.command()
def drain(context: typer.Context, name: Name, wait: Wait = True, timeout: Timeout = None, json: Json = False) -> None:
    """Cordon a node and wait until nothing runs there: calls that can be carried move to other nodes, others end."""
    until = time.monotonic() + timeout if timeout is not None else math.inf
    heard, away = time.monotonic(), None
    found = _wish(context, name, "drain")
    going_on = f"{name} goes on draining: `sllm node uncordon {name}` ends that"
    with naming(going_on), output.progress("draining", quiet=json):
        while wait and not _empty(found):
            now = time.monotonic()
            heard = now if found.alive else heard
            if now - heard >= UNHEARD_S:
                if away is not None:  # nobody has said that of the node
                    away.message += f"; whether something still runs on {name} is not known, it goes on draining"
                    raise away
                raise Unavailable(
                    f"node {name} is not heard: whether something still runs there is not known; it stays cordoned"
                )
            if now >= until:
                raise DeadlineExceeded(
                    f"{found.instances} instance(s) still run on {name} after {timeout:g} s; it goes on draining"
                )
            time.sleep(POLL_S)
            seen, away = _seen(context, name)
            found = seen or found.model_copy(update={"alive": False})
            if not found.cordoned:
                raise Conflict(f"node {name} was taken into use again meanwhile; drain it anew if it is to end")
    _said(found, "is drained" if _empty(found) else "is being drained", json)


def _empty(found: NodeView) -> bool:
    """Whether it is known that nothing runs there."""
    return found.alive and not found.instances


def _seen(context: typer.Context, name: str) -> tuple[NodeView | None, SllmError | None]:
    """Or why it is not known now, as while the gateway is started anew."""
    try:
        with client(context) as connection:
            return NodeDetailView.model_validate(connection.request("GET", _path(name))), None
    except SllmError as error:
        if not error.retryable:
            raise
        return None, error
