"""``sllm profile``: where platforms are and how to be let in."""

from __future__ import annotations

from typing import Annotated

import typer

from sllm import profiles
from sllm.cli import output
from sllm.cli.context import Json, Target
from sllm_runtime.protocol.errors import InvalidArgument

app = typer.Typer(
    help="Where platforms are and how to be let in.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
Name = Annotated[str, typer.Argument(help="The profile's name.")]


@app.command("list")
def list_(json: Json = False) -> None:
    """All profiles; tokens are not shown."""
    found = profiles.stored()
    if json:
        shown = [{"name": each.name, "url": each.url, "token": each.token is not None} for each in found]
        output.value({"profiles": shown})
        return
    rows = [(each.name, each.url, "set" if each.token else "-") for each in found]
    output.table(("NAME", "URL", "TOKEN"), rows, empty="no profiles yet; `sllm up` writes one")


@app.command("set")
def set_(context: typer.Context, name: Name, json: Json = False) -> None:
    """Store --url and --token (options before the verb, or SLLM_URL and SLLM_TOKEN) under a name."""
    target = context.find_object(Target) or Target()
    given = profiles.given(target.url, target.token)
    if given.url is None:
        raise InvalidArgument("say where: sllm --url URL [--token TOKEN] profile set NAME", field="--url")
    path = profiles.save(name, given.url, given.token)
    if json:
        output.value({"name": name, "url": given.url, "file": str(path)})
    else:
        output.text(f"{name}: {given.url} in {path}")


@app.command()
def delete(name: Name, json: Json = False) -> None:
    """Remove a profile."""
    profiles.remove(name)
    if json:
        output.value({"name": name, "deleted": True})
    else:
        output.text(f"{name}: deleted")
