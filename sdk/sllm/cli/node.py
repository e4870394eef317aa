"""``sllm node``: the cluster's nodes."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm_runtime.protocol.http import API, NodeDetailView, NodeListView

app = typer.Typer(
    help="Look at the cluster's nodes.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)


@app.callback()
def root() -> None:
    """Look at the cluster's nodes."""


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
    with client(context) as connection:
        found = NodeDetailView.model_validate(connection.request("GET", f"{API}/nodes/{quote(name, safe='')}"))
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        show.node(found)
