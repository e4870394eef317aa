"""``sllm model``: models by content. What works on a directory comes from loaderd, the rest from the platform."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sllm import transport
from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm.cli.lazy import LazyGroup, load_contributed
from sllm_runtime.protocol.errors import CorruptCheckpoint, DeadlineExceeded, InvalidArgument, ModelNotFound
from sllm_runtime.protocol.http import API, ModelListView, ModelView, NodeDetailListView, NodeDetailView, PlacementView
from sllm_runtime.protocol.quantities import show_bytes

if TYPE_CHECKING:
    from sllm.client import Client

_DIGEST: Final = re.compile(r"^(sha256:)?[0-9a-f]{4,64}$")
app = typer.Typer(
    cls=LazyGroup.of(
        {}, order=("convert", "register", "pull", "place", "list", "describe", "validate", "delete"), prefix="model"
    ),
    help="Convert, register and look after models.",
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
)
Digest = Annotated[str, typer.Argument(help="A registered model's digest, or its first digits.")]
Target = Annotated[str, typer.Argument(help="A registered model's digest (or its first digits), or a directory.")]


@app.command()
def register(
    context: typer.Context,
    uri: Annotated[str, typer.Argument(help="A directory that the nodes can read, hf://…, s3://…")],
    json: Json = False,
) -> None:
    """Have the platform take in a model."""
    place = uri if "://" in uri else str(Path(uri).expanduser().absolute())
    try:
        place.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{uri!a:.100} is no UTF-8; name a place that is", field="uri") from error
    going_on = "the platform may go on taking it in; `sllm model list` says whether it is there"
    with client(context) as connection, naming(going_on), output.progress(uri, quiet=json) as observe:
        result = connection.operation(f"{API}/models", {"uri": place}, observe)
    _one(ModelView.model_validate_json(result), json)


@app.command()
def pull(
    context: typer.Context,
    digest: Digest,
    to: Annotated[
        list[str] | None, typer.Option(help="A node; several may be named. All that are up if none is.")
    ] = None,
    json: Json = False,
) -> None:
    """Bring a model to the disks of nodes, before anything starts there."""
    going_on = "the nodes go on with it; `sllm model list --tiers` says where it lies"
    path, nodes = f"{_path(digest)}/pull", [transport.named(node, "node") for node in to or []]
    with client(context) as connection, naming(going_on), output.progress(digest, quiet=json) as observe:
        result = connection.operation(path, {"nodes": nodes}, observe)
    view = ModelView.model_validate_json(result)
    if json:
        output.value(view.model_dump(mode="json"))
    else:
        output.text(f"{view.digest}: on the disk of {', '.join(view.nodes)}")


@app.command()
def place(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say where they should lie, and do.")] = False,
    json: Json = False,
) -> None:
    """Decide anew on which nodes' SSDs models lie, by how often they are started, and begin to bring what lacks."""
    going_on = "the nodes may go on with it: `sllm model place --dry-run` says how far it is"
    with client(context) as connection, naming(going_on):
        found = connection.request("GET" if dry_run else "POST", f"{API}/placement")
    placed = PlacementView.model_validate(found)
    if json:
        output.value(placed.model_dump(mode="json"))
        return
    rows = [
        (
            each.model[:19],
            show_bytes(each.bytes),
            f"{each.popularity:.1f}",
            ", ".join(each.wanted),
            ", ".join(each.there),
        )
        for each in placed.models
    ]
    output.table(("MODEL", "SIZE", "STARTS", "WANTED ON", "LIES ON"), rows, empty="no model is read from a source")


def _one(view: ModelView, json: bool) -> None:
    if json:
        output.value(view.model_dump(mode="json"))
    else:
        show.model(view)


@app.command("list")
def list_(
    context: typer.Context,
    tiers: Annotated[bool, typer.Option("--tiers", help="Say in which tiers of each node it lies.")] = False,
    json: Json = False,
) -> None:
    """All registered models."""
    with client(context) as connection:
        found = ModelListView.model_validate(connection.request("GET", f"{API}/models"))
        nodes = _nodes(connection) if tiers else ()
    if json:
        where = {node.node: node.tiers for node in nodes}
        output.value(found.model_dump(mode="json") | ({"tiers": where} if tiers else {}))
        return
    places = {
        model.digest: "; ".join(
            f"{n.node}: {', '.join(n.tiers[model.digest])}" for n in nodes if model.digest in n.tiers
        )
        for model in found.models
    }
    show.models(found.models, places if tiers else None)


def _nodes(connection: Client) -> tuple[NodeDetailView, ...]:
    """Every node with what lies on it."""
    found = connection.request("GET", f"{API}/nodes", params={"detail": "true"})
    return NodeDetailListView.model_validate(found).nodes


def _path(digest: str) -> str:
    return f"{API}/models/{transport.segment(digest, 'model')}"


def _directory(target: str) -> Path | None:
    """``target`` as a directory here, or ``None`` for a digest. Raises ``ModelNotFound`` for what is neither."""
    if os.path.isdir(target):  # of no name, or one too long, ``Path`` has it that it is one, or raises
        return Path(target)
    if _DIGEST.match(target):
        return None
    raise ModelNotFound(
        f"{target:.100} is neither a directory here nor a model's digest; `sllm model list` shows those"
    )


@app.command()
def describe(context: typer.Context, target: Target, json: Json = False) -> None:
    """Say what a model is: one that is registered, or a converted one in a directory."""
    directory = _directory(target)
    if directory is not None:
        load_contributed("model", "describe")(directory, json=json)
        return
    with client(context) as connection:
        _one(ModelView.model_validate(connection.request("GET", _path(target))), json)


@app.command()
def validate(context: typer.Context, target: Target, json: Json = False) -> None:
    """Compare every byte of a model with its digest."""
    directory = _directory(target)
    if directory is not None:
        load_contributed("model", "validate")(directory, json=json)
        return
    going_on = "its nodes go on reading it; `sllm model validate` again joins them"
    with client(context) as connection, naming(going_on), output.progress(f"{target}: reading every byte", quiet=json):
        while (view := _validated(connection, target)) is None:
            continue
    if view.problem:
        raise CorruptCheckpoint(f"{view.digest}: {view.problem}")
    if json:
        output.value({"model": view.digest, "valid": True})
    else:
        output.text(f"{view.digest}: every byte is right on {', '.join(view.nodes) or 'no node'}")


def _validated(connection: Client, digest: str) -> ModelView | None:
    """None: it goes on, and is joined by who asks again."""
    path = f"{_path(digest)}/validate"
    try:
        return ModelView.model_validate(connection.request("POST", path, timeout=600.0))
    except DeadlineExceeded:
        return None


@app.command()
def delete(context: typer.Context, digest: Digest, json: Json = False) -> None:
    """Remove a model that no version uses."""
    if not _DIGEST.match(digest):
        raise ModelNotFound(f"{digest:.100} is no model's digest; `sllm model list` shows those")
    fate = "it may be deleted: `sllm model list` says so"
    with client(context) as connection, naming(fate):
        found = ModelView.model_validate(connection.request("DELETE", _path(digest)))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    output.text(f"{digest}: deleted")
    if found.problem:
        output.note(found.problem)
