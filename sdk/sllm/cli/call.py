"""``sllm call``: calls that are kept, and ending those that run."""

from __future__ import annotations

import json as json_text
from typing import Annotated
from urllib.parse import quote

import typer

from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm_runtime.protocol.http import CALLS, CallListView, CallView

app = typer.Typer(
    help="Look at calls that are kept, and cancel calls.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
Id = Annotated[str, typer.Argument(help="The call's id: the header Sllm-Call-Id of its answer.")]


@app.callback()
def root() -> None:
    """Look at calls that are kept, and cancel calls."""


@app.command("list")
def list_(
    context: typer.Context,
    function: Annotated[str, typer.Option(help="Those of one function.")] = "",
    state: Annotated[str, typer.Option(help="QUEUED, RUNNING, SUCCEEDED, FAILED or CANCELLED.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 100,
    json: Json = False,
) -> None:
    """Calls that were asked for with `Prefer: respond-async` or an Idempotency-Key, the newest first."""
    wanted = {"function": function, "state": state, "limit": str(limit)}
    params = {key: value for key, value in wanted.items() if value}
    with client(context) as connection:
        found = CallListView.model_validate(connection.request("GET", CALLS, params=params))
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        show.calls(found.calls)


@app.command()
def status(context: typer.Context, call: Id, json: Json = False) -> None:
    """How a kept call stands, and what it answered."""
    with client(context) as connection:
        found = CallView.model_validate(connection.request("GET", f"{CALLS}/{quote(call, safe='')}"))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    show.calls([found])
    if found.waits:
        output.text(f"it waits: {found.waits}")
    if found.error is not None:
        output.text(f"{found.error.code}: {found.error.message}")
    if found.result is not None:
        output.text(json_text.dumps(found.result, ensure_ascii=False))


@app.command()
def cancel(context: typer.Context, call: Id, json: Json = False) -> None:
    """End a call, kept or not. Repeatable."""
    with client(context) as connection:
        connection.request("POST", f"{CALLS}/{quote(call, safe='')}/cancel")
    if json:
        output.value({"id": call})
    else:
        output.text(f"{call} is cancelled")
