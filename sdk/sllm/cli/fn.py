"""``sllm fn``: the life of functions."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer

from sllm import project, transport
from sllm.answers import of_a_proxy
from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm.cli.deploy import deploy
from sllm.cli.interrupt import naming
from sllm.cli.invoke import invoke
from sllm.cli.logs import logs
from sllm.cli.warmup import warmup
from sllm_runtime.protocol.errors import FunctionNotFound, InstanceLost, NoController, SllmError
from sllm_runtime.protocol.http import API, FunctionListView, FunctionView

app = typer.Typer(
    help="Deploy, call and look after functions.", no_args_is_help=True, rich_markup_mode=None, add_completion=False
)
Name = Annotated[str, typer.Argument(help="The function's name.")]


@app.command()
def init(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    template: Annotated[str, typer.Option(help="One of: " + ", ".join(project.templates()))] = "basic",
    json: Json = False,
) -> None:
    """Begin a function from a template."""
    written = project.init(directory, template)
    if json:
        output.value({"directory": str(directory), "template": template, "files": written})
        return
    output.text(f"{directory}: {', '.join(written)}")
    output.note(f"next: sllm fn deploy {shlex.quote(str(directory / 'function.py'))}")


app.command()(deploy)


@app.command("list")
def list_(context: typer.Context, json: Json = False) -> None:
    """All functions."""
    with client(context) as connection:
        found = FunctionListView.model_validate(connection.request("GET", f"{API}/functions"))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    show.functions(found.functions)


def _view(context: typer.Context, name: str) -> FunctionView:
    with client(context) as connection:
        return FunctionView.model_validate(connection.request("GET", transport.about(name)))


@app.command()
def describe(context: typer.Context, name: Name, json: Json = False) -> None:
    """One function: manifest, versions, instances."""
    view = _view(context, name)
    if json:
        output.value(view.model_dump(mode="json"))
    else:
        show.function(view)


app.command()(invoke)
app.command()(warmup)
app.command()(logs)


@app.command()
def history(context: typer.Context, name: Name, json: Json = False) -> None:
    """A function's versions."""
    view = _view(context, name)
    if json:
        output.value([version.model_dump(mode="json") for version in view.versions])
    else:
        show.versions(view.versions)


@app.command()
def rollback(
    context: typer.Context,
    name: Name,
    version: Annotated[int | None, typer.Option(help="To which version; the one before if not given.")] = None,
    json: Json = False,
) -> None:
    """Give the route back to an earlier version, at once."""
    body = {"version": version, "request": uuid4().hex}
    with client(context) as connection, naming(f"the rollback may be done: `sllm fn history {name}` says so"):
        try:
            answer: Any = connection.request("POST", f"{transport.about(name)}/rollback", json=body)
        except SllmError as error:
            heard = isinstance(error, NoController | InstanceLost) or of_a_proxy(error)
            if heard and version is None:  # it may have been done, and this command has a name of its own
                error.retryable = False
                error.message += f"; see `sllm fn history {name}`, then name a version: `--version N`"
            raise
    view = FunctionView.model_validate(answer)
    if json:
        output.value(view.model_dump(mode="json"))
    else:
        output.text(f"{name}: version {view.active} has the route")


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Cancel what runs; else running calls finish.")] = False,
    json: Json = False,
) -> None:
    """Remove a function with all its versions; waits until running calls have finished."""
    going_on = f"{name} takes no more calls and goes once those that run have finished; `--force` cancels them"
    with client(context) as connection, naming(going_on), output.progress(f"{name}: draining", quiet=json):
        answer = _delete(connection, name, force)
    if json:
        output.value(answer)
    else:
        output.text(f"{name}: deleted")


def _delete(connection: Any, name: str, force: bool) -> Any:
    """Asks until it is gone: the gateway answers after a while also where calls still run."""
    query = {"force": "true"} if force else {}
    while True:
        try:
            answer = connection.request("DELETE", transport.about(name), params=query)
        except FunctionNotFound:  # of a gateway of before, to which ``begun`` says nothing
            if "begun" not in query:
                raise
            return {"function": name, "deleted": True, "note": "deleted"}
        if not isinstance(answer, dict) or answer.get("deleted", True):
            return answer
        query["begun"] = "true"  # what has its name after that is another's
