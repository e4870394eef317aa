"""``sllm migrate``: running calls of an instance go on at another node."""

from __future__ import annotations

from typing import Annotated

import typer

from sllm import transport
from sllm.cli import output
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.http import API, MigrationView
from sllm_runtime.protocol.states import MIGRATION, MigrationState, final


def migrate(
    context: typer.Context,
    instance: Annotated[str, typer.Argument(help="The instance; `sllm fn describe` shows those of a function.")],
    to: Annotated[str | None, typer.Option(help="The node to go to; else the scheduler chooses one.")] = None,
    json: Json = False,
) -> None:
    """Move the running calls of an instance to another node, and end it. Their callers notice nothing."""
    path = f"{API}/instances/{transport.segment(instance, 'instance')}/migrate"
    body = {"to": transport.named(to, "node") if to is not None else ""}
    going_on = f"it goes on moving: `sllm migrate {instance}` again says how that ends"
    with client(context) as connection, naming(going_on), output.progress("moving", quiet=json):
        while True:
            found = MigrationView.model_validate(connection.request("POST", path, json=body))
            if final(MIGRATION, MigrationState(found.state)):
                break
    if found.state != MigrationState.DONE:
        raise Unavailable(f"instance {instance} did not move: {found.note}")
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        output.text(f"{found.instance} -> {found.destination} on {found.node}")
