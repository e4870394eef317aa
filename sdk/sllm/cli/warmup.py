"""``sllm fn warmup``: instances that are there before anybody calls."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from sllm import transport
from sllm.cli import output
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm_runtime.protocol.errors import DeadlineExceeded
from sllm_runtime.protocol.http import ProgressView, WarmView


def warmup(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The function's name.")],
    instances: Annotated[int, typer.Option(min=1, help="How many; at most its max_instances.")] = 1,
    version: Annotated[int | None, typer.Option(help="Of which version; of the active one if not given.")] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds to wait for them.")] = 300.0,
    json: Json = False,
) -> None:
    """Start instances before anybody calls. They live by the function's keep_alive from then on."""
    going_on = f"what has begun to start lives by its keep_alive: `sllm fn describe {name}` shows it"
    wish = {"instances": instances, "version": version}
    until = time.monotonic() + timeout
    with client(context) as connection, naming(going_on), output.progress(name, quiet=json) as observe:
        while True:
            answer = connection.request("POST", f"{transport.about(name)}/warmup", json=wish)
            found = WarmView.model_validate(answer)
            if found.ready >= found.wanted:
                break
            told = found.progress or ProgressView(stage="placement")
            if time.monotonic() >= until:
                why = told.message or told.stage
                raise DeadlineExceeded(f"{found.ready} of {found.wanted} are ready after {timeout:g} s: {why}")
            observe(told)
    if json:
        output.value(found.model_dump(mode="json"))
    else:
        output.text(f"{name}: {found.ready} instance(s) of version {found.version} are ready")
