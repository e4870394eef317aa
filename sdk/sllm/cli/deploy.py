"""``sllm fn deploy``: from a file to a version that has the route."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated
from uuid import uuid4

import typer

from sllm import bundle, deployment
from sllm.bundle import Bundle
from sllm.cli import load, output
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm.client import Client
from sllm_runtime.protocol.errors import SllmError, StartFailed
from sllm_runtime.protocol.http import DeployResult
from sllm_runtime.protocol.quantities import show_bytes


def deploy(
    context: typer.Context,
    target: Annotated[str, typer.Argument(help="file.py, file.py::name, or a directory with function.py.")],
    json: Json = False,
) -> None:
    """Deploy the function (or functions) a file describes."""
    # All are bundled before the first is deployed: what is wrong with one stops all.
    bundles = [bundle.build(function) for function in load.load(target)]
    with client(context) as connection:
        for built in bundles:
            result = _deploy(built, connection, quiet=json)
            for line in () if json else result.notes:
                output.note(f"{built.manifest.name}: {line}")
            if json:
                output.value(result.model_dump(mode="json"))
            else:
                same = " (unchanged)" if result.unchanged else ""
                output.text(
                    f"{built.manifest.name} v{result.version}{same}: POST {connection.url}{result.function.url}"
                )


def _deploy(built: Bundle, connection: Client, *, quiet: bool) -> DeployResult:
    name = built.manifest.name
    asked, request = False, uuid4().hex
    if not quiet:
        output.note(f"{name}: {len(built.files)} files, {show_bytes(len(built.data))}")
        for link in built.left_out:
            output.note(f"{name}: {link} is {_link(built, link)}")
        if built.warning:
            output.note(f"{name}: {built.warning}")

    def fate() -> str:
        if not asked:
            return f"{name} is not deployed"
        return _undone(connection, name, request)

    with naming(fate), output.progress(name, quiet=quiet) as observe:
        deployment.upload(built, connection, observe)
        asked = True
        try:
            return deployment.deploy_stored(built, connection, observe, request)
        except StartFailed as error:
            if not quiet and error.stage in ("import", "setup"):  # its own code ran
                error.message += f"; see `sllm fn logs {name}`"
            raise


def _link(built: Bundle, link: str) -> str:
    """What of a link is left out."""
    root = built.root
    if (
        root is not None
        and (leads_to := Path(os.path.realpath(root / link))).is_dir()
        and leads_to.is_relative_to(root.resolve())
    ):
        return "a link to a directory and is left out; only files are followed"
    return "a link to outside its directory and is left out"


def _undone(connection: Client, name: str, request: str) -> str:
    """Call the deployment back; what became of it."""
    try:
        withdrawn = deployment.withdraw(connection, request)
    except SllmError as error:
        goes_on = f"the deployment of {name} may go on; `sllm fn describe {name}` says how it ended"
        return f"{goes_on} (it could not be called back: {error.message})"
    if withdrawn.undone:
        return f"{name} is not deployed: what was begun is undone"
    return f"{name} v{withdrawn.version} was deployed already; `sllm fn rollback {name}` goes back"
