"""``sllm secret``: what functions are given as files and nobody is shown."""

from __future__ import annotations

import base64
import getpass
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from sllm import transport
from sllm.cli import output
from sllm.cli.context import Json, client
from sllm_runtime.protocol.errors import InvalidArgument
from sllm_runtime.protocol.http import API, SecretListView, SecretView
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.secrets import MAX_SECRET, secret_name

app = typer.Typer(
    help="Store secrets for functions.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
Name = Annotated[str, typer.Argument(help="The secret's name.")]


@app.callback()
def root() -> None:
    """Store secrets for functions."""


@app.command("set")
def set_(
    context: typer.Context,
    name: Name,
    file: Annotated[Path | None, typer.Option(help="Take the value from this file, byte for byte.")] = None,
    json: Json = False,
) -> None:
    """Store a secret, in place of an older one. Its value is asked for, or read from stdin (without the line's end) or
    --file; it is never an argument, which everybody on this machine could read."""
    path = _path(name)
    body = {"value": base64.b64encode(_value(name, file)).decode()}
    with client(context) as connection:
        found = SecretView.model_validate(connection.request("PUT", path, json=body))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    output.text(f"{name} is stored")
    if found.functions:
        output.note(f"{', '.join(found.functions)}: instances that run keep the value that they started with")
    else:  # it is no environment variable, as elsewhere
        output.note(f'a function that says secrets=["{name}"] has it as sllm.secret("{name}")')


@app.command("list")
def list_(context: typer.Context, json: Json = False) -> None:
    """All secrets by name; values are not shown."""
    with client(context) as connection:
        found = SecretListView.model_validate(connection.request("GET", f"{API}/secrets"))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    rows = [(each.name, _time(each.stored), ", ".join(each.functions) or "-") for each in found.secrets]
    output.table(("NAME", "STORED", "FUNCTIONS"), rows, empty="no secrets; `sllm secret set NAME` stores one")


@app.command()
def delete(context: typer.Context, name: Name, json: Json = False) -> None:
    """Forget a secret that no function needs."""
    path = _path(name)
    with client(context) as connection:
        connection.request("DELETE", path)
    if json:
        output.value({"name": name, "deleted": True})
    else:
        output.text(f"{name}: deleted")


def _path(name: str) -> str:
    try:
        return f"{API}/secrets/{transport.segment(secret_name(name), 'secret')}"
    except ValueError as error:
        raise InvalidArgument(str(error), field="name") from error


def _value(name: str, file: Path | None) -> bytes:
    if file is not None:
        found = _read(file)
    elif sys.stdin.isatty():
        found = getpass.getpass(f"{name}: ").encode()
    else:
        found = sys.stdin.buffer.read(MAX_SECRET + 2).removesuffix(b"\n").removesuffix(b"\r")
    if not 0 < len(found) <= MAX_SECRET:
        what = "is empty" if not found else f"has more than {show_bytes(MAX_SECRET)}"
        raise InvalidArgument(f"the value of {name} {what}; nothing was stored", field="value")
    return found


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(MAX_SECRET + 1)
    except OSError as error:
        raise InvalidArgument(f"{file}: {error.strerror}", field="--file") from error


def _time(stored: float) -> str:
    return datetime.fromtimestamp(stored).astimezone().strftime("%Y-%m-%d %H:%M:%S")
