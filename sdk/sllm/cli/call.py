"""``sllm call``: calls that run, wait or are kept, and ending them."""

from __future__ import annotations

from typing import Annotated

import typer

from sllm import transport
from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm_runtime.protocol.http import CALLS, CallListView, CallView, CancelledView
from sllm_runtime.protocol.states import CALL, CallState, final

app = typer.Typer(
    help="Look at calls that run, wait or are kept, and cancel calls.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
Id = Annotated[str, typer.Argument(help="The call's id: the header Sllm-Call-Id of its answer.")]


@app.callback()
def root() -> None:
    """Look at calls that run, wait or are kept, and cancel calls."""


@app.command("list")
def list_(
    context: typer.Context,
    function: Annotated[str | None, typer.Option(help="Those of one function.")] = None,
    state: Annotated[
        str | None, typer.Option(help="QUEUED, STARTING, RUNNING, SUCCEEDED, FAILED or CANCELLED.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="The newest so many.")] = 100,
    after: Annotated[str | None, typer.Option(help="Go on where a list of before ended, as it said.")] = None,
    json: Json = False,
) -> None:
    """Calls that run or wait at any gateway, and those that are kept (asked for with `Prefer: respond-async` or an
    Idempotency-Key), the newest first."""
    wanted = ("function", "function", function), ("state", "state", state), ("after", "place in a list", after)
    params = {"limit": str(limit)} | {
        key: transport.named(word, what) for key, what, word in wanted if word is not None
    }
    with client(context) as connection:
        found = CallListView.model_validate(connection.request("GET", CALLS, params=params))
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        show.calls(found.calls)
        if found.next:
            output.note(f"there are more: --after {found.next}")
        if found.silent:
            silent = ", ".join(found.silent)
            output.note(f"no answer of {silent}: what runs or waits there is left out, if it is not kept")


@app.command()
def status(context: typer.Context, call: Id, json: Json = False) -> None:
    """How a call stands that runs, waits or is kept, and what a kept one answered."""
    path = _path(call)
    with client(context) as connection:
        found = CallView.model_validate(connection.request("GET", path))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    show.calls([found])
    if found.waits:
        output.text(output.one_line(f"it waits: {found.waits}"))
    if found.error is not None:
        output.text(f"{found.error.code}: {found.error.message}")
    if found.result is not None:
        output.value(found.result)


@app.command()
def cancel(context: typer.Context, call: Id, json: Json = False) -> None:
    """End a call, kept or not. Repeatable."""
    path = f"{_path(call)}/cancel"
    with client(context) as connection, naming(f"{call} may be cancelled: `sllm call status {call}` says so"):
        found = CancelledView.model_validate(connection.request("POST", path))
    if json:
        output.value(found.model_dump(mode="json"))
    elif found.state == CallState.CANCELLED:
        output.text(f"{call} is cancelled")
    elif final(CALL, CallState(found.state)):
        output.text(f"{call} had ended before: {found.state}")
    else:
        output.text(f"{call} is cancelled as soon as a gateway goes on with it; now none has it")


def _path(call: str) -> str:
    return f"{CALLS}/{transport.segment(call, 'call')}"
