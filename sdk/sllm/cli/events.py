"""``sllm events``: what happened, and with ``-f`` what happens."""

from __future__ import annotations

import json as json_
import time
from typing import Annotated, Any

import typer

from sllm import answers, transport
from sllm.answers import Trace
from sllm.cli import output
from sllm.cli.context import Json, client
from sllm_runtime.protocol.http import API


def events(
    context: typer.Context,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as things happen.")] = False,
    function: Annotated[str | None, typer.Option(help="Only what is about this function.")] = None,
    call: Annotated[str | None, typer.Option(help="Only what is about the call of this id.")] = None,
    kind: Annotated[str | None, typer.Option(help="Only of this kind: `call.failed`, or `call` for all of it.")] = None,
    limit: Annotated[int, typer.Option(min=0, max=10_000, help="At most so many of the latest.")] = 100,
    since: Annotated[float | None, typer.Option(help="Only of the last so many seconds.")] = None,
    json: Json = False,
) -> None:
    """Show what happened to nodes, functions, instances and calls."""
    query = {"limit": str(limit), "follow": "true" if follow else "false"}
    about = {key: value for key, value in (("function", function), ("call", call), ("kind", kind)) if value is not None}
    query |= {key: transport.named(value, "kind of events" if key == "kind" else key) for key, value in about.items()}
    query |= {"since": str(time.time() - since), "ago": str(since)} if since is not None else {}
    came = False
    with client(context) as connection:
        for event in connection.follow(f"{API}/events", query):
            if event.comment is not None or event.done:
                continue
            if event.event == "error":
                answers.value_of(event, Trace())
            found, came = json_.loads(event.data), True
            if json:
                output.value(found)
            else:
                output.text(line(found))
    if limit and not (came or follow or json):
        output.note(_nothing(about, since))


def _nothing(about: dict[str, str], since: float | None) -> str:
    """That no event came, of what was asked for."""
    asked = [f"{key} {value}" for key, value in about.items()]
    asked += [f"the last {since:g} s"] if since is not None else []
    of = f"of {' and '.join(asked)}" if asked else ""
    succeeded = "; a call that finds an instance and succeeds leaves none" if "call" in about else ""
    return " ".join(filter(None, ("no event", of, "is kept"))) + succeeded


def line(found: dict[str, Any]) -> str:
    """One event for people, whatever lines its texts have."""
    version = f" v{found['version']}" if found.get("version") is not None else ""
    about = " ".join(str(found[key]) for key in ("function", "instance", "node", "call") if found.get(key))
    fields = " ".join(f"{key}={value}" for key, value in found.get("fields", {}).items())
    clock = output.clock(found.get("at", 0))
    parts = (clock, f"{found.get('kind', '?'):<20}", about + version, found.get("message", ""), fields)
    return output.one_line("  ".join(part for part in parts if part))
