"""``sllm fn logs``: what a function wrote and raised, kept after its instances are gone."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from sllm import answers, transport
from sllm.answers import Trace
from sllm.cli import output
from sllm.cli.context import Json, client
from sllm.client import Client
from sllm_runtime.protocol.errors import FunctionNotFound
from sllm_runtime.protocol.http import LogView


def logs(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The function's name.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    call: Annotated[str | None, typer.Option(help="Only this call's lines.")] = None,
    limit: Annotated[int, typer.Option(min=0, max=10_000, help="At most so many of the latest lines.")] = 200,
    since: Annotated[float | None, typer.Option(help="Only lines of the last so many seconds.")] = None,
    json: Json = False,
) -> None:
    """A function's log."""
    query = {"limit": str(limit), "follow": "true" if follow else "false"}
    query |= {"call": transport.named(call, "call")} if call is not None else {}
    if since is not None:
        # By this clock, and for a gateway that knows it by its own.
        query |= {"since": str(time.time() - since), "ago": str(since)}
    with client(context) as connection:
        if follow and not json:
            _tell_if_absent(connection, name)
        for event in connection.follow(f"{transport.about(name)}/logs", query):
            if event.comment is not None or event.done:
                continue
            if event.event == "error":
                answers.value_of(event, Trace())
            view = LogView.model_validate_json(event.data)
            if json:
                output.value(view.model_dump(mode="json"))
            else:
                output.raw(line(view))


def _tell_if_absent(connection: Client, name: str) -> None:
    """A name that nothing has would otherwise be followed in silence."""
    try:
        connection.request("GET", transport.about(name))
    except FunctionNotFound:
        output.note(f"no function is deployed as {name}; its lines are shown as they come, should it be")


def line(view: LogView) -> str:
    """One line for people."""
    lost = f"({view.dropped} lines dropped) " if view.dropped else ""
    who = f"v{view.version} {view.instance}" + (f" {view.call}" if view.call else "")
    return f"{output.clock(view.at)} {who} {view.stream}: {lost}{view.text}"
