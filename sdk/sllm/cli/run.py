"""``sllm run``: one call of a function here, without a platform."""

from __future__ import annotations

import os
import sys
from contextlib import redirect_stdout
from typing import Annotated, Any

import typer

from sllm import local, signature
from sllm.cli import arguments, ctrl_c, load, output, streams
from sllm.cli.context import Json
from sllm.cli.invoke import Args, Words, given_words, show_value
from sllm.function import ModelFunction
from sllm_runtime.protocol.errors import SllmError


def run(
    target: Annotated[str, typer.Argument(help="file.py, file.py::name, or a directory with function.py.")],
    words: Words = None,
    args: Args = None,
    json: Json = False,
) -> None:
    """Run one call of a function here, without a platform."""
    function = load.one(target)
    texts, given = given_words(words, args)
    given |= arguments.meant(texts, signature.input_schema(function.target))
    try:
        with ctrl_c.answer.in_users_code():
            _call(function, given, json)
    except (SllmError, streams.Closed):
        raise
    except (Exception, SystemExit) as error:  # the user's function may raise anything
        problem = local.user_error(error, function.source_file())
        if problem.detail and not json:
            output.note(problem.detail.rstrip())
        raise problem from error


def _call(function: ModelFunction[Any, Any, Any], given: dict[str, Any], as_json: bool) -> None:
    pieces, results = False, sys.stdout
    os.environ.update(function.options.get("env", {}))
    # What the function prints is no result of ours.
    with redirect_stdout(sys.stderr), output.progress(function.name, quiet=as_json) as shown:
        try:
            with local.stream_local(function, given, shown) as values:
                for value in values:
                    shown.stop()
                    pieces = pieces or isinstance(value, str)
                    with redirect_stdout(results):
                        show_value(value, as_json, end="" if isinstance(value, str) else "\n")
        finally:
            if pieces and not as_json:
                with redirect_stdout(results):
                    output.text("")
