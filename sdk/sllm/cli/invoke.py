"""``sllm fn invoke``: one call from the command line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from sllm import transport
from sllm.answers import Trace
from sllm.cli import arguments, output, show
from sllm.cli.context import Json, client
from sllm.cli.interrupt import naming
from sllm.client import Client
from sllm_runtime.protocol.errors import FunctionError, InvalidArgument
from sllm_runtime.protocol.http import FunctionView, ProgressView

Words = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Arguments.")]
Args = Annotated[
    str | None, typer.Option("--args", "--json-args", help="Arguments as a JSON object; @FILE, or - for stdin.")
]


def invoke(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The function's name.")],
    words: Words = None,
    args: Args = None,
    version: Annotated[int | None, typer.Option(help="A version other than the active one.")] = None,
    stream: Annotated[bool, typer.Option(help="Print values as they come.")] = True,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show where the time went.")] = False,
    json: Json = False,
) -> None:
    """Call a function and print what it answers; Ctrl-C cancels the call."""
    given, trace = given_words(words, args), Trace()
    with client(context) as connection:
        found = {**given[1], **_meant(connection, name, given[0], version, quiet=json)}
        with naming(lambda: _fate(name, trace)), _told_where(name, trace, json):
            if stream:
                _stream(connection, name, found, version, trace, json)
            else:
                with output.progress(f"{name}: waiting", quiet=json):
                    answer = connection.call(name, found, version=version, trace=trace)
                show_value(answer, json)
    if verbose:
        _tell(trace, json)


@contextmanager
def _told_where(name: str, trace: Trace, as_json: bool) -> Iterator[None]:
    """What a function raised is told by its type and text, which may be empty; its log has the line."""
    try:
        yield
    except FunctionError as error:
        if trace.call and not as_json:
            said = error.message.rstrip().rstrip(":")
            error.message = f"{said}; see `sllm fn logs {name} --call {trace.call}`"
        raise


def _fate(name: str, trace: Trace) -> str:
    """What became of a call that was left."""
    if trace.cancelled:
        return f"call {trace.call or f'of {name}'} is cancelled"
    return f"call {trace.call} may go on, no gateway answered: `sllm call cancel {trace.call}` ends it"


def _tell(trace: Trace, as_json: bool) -> None:
    """Where the time went, on stderr."""
    if as_json:
        spans = [{"name": span.name, "at": span.at, "ms": span.ms} for span in trace.timeline]
        output.note(dumps({"call": trace.call, "timeline": spans}))
        return
    output.note(f"call {trace.call}")
    show.timeline(trace.timeline)


def given_words(words: list[str] | None, args: str | None) -> tuple[dict[str, str], dict[str, Any]]:
    """The ``key=value`` words, not yet understood, and what ``--args`` says. Raises ``InvalidArgument``."""
    if args is None:
        return arguments.split(words or []), {}
    try:
        # As bytes: JSON says itself which UTF it is, whatever this machine's own encoding.
        text = sys.stdin.buffer.read() if args == "-" else Path(args[1:]).read_bytes() if args[:1] == "@" else args
    except OSError as error:
        raise InvalidArgument(f"--args {args} cannot be read: {error}", field="--args") from error
    return arguments.split(words or []), arguments.document(text)


def _meant(connection: Client, name: str, words: dict[str, str], version: int | None, *, quiet: bool) -> dict[str, Any]:
    """The words as the function's parameters take them; its types are only asked for where it matters."""
    schema: dict[str, Any] = {}
    unsure = [f"{key}={raw}" for key, raw in words.items() if arguments.ambiguous(raw)]
    if unsure:
        view = FunctionView.model_validate(connection.request("GET", transport.about(name)))
        schema = view.manifest.handler.input_schema if view.manifest else {}
        if version not in (None, view.active) and not quiet:  # the platform shows the manifest of the active one alone
            output.note(f"{' '.join(unsure)}: read by the types of v{view.active}, which is active; --args is exact")
    return arguments.meant(words, schema)


def _stream(
    connection: Client, name: str, given: dict[str, Any], version: int | None, trace: Trace, as_json: bool
) -> None:
    """Print values as they come; before the first, show what the start is doing."""
    shown = output.Progress(name, quiet=as_json)

    def observe(view: ProgressView) -> None:
        shown.start()
        shown(view)

    trace.observe = observe
    pieces = False
    try:
        with closing(connection.stream(name, given, version=version, trace=trace)) as values:
            for value in values:
                shown.stop()
                pieces = pieces or isinstance(value, str)
                show_value(value, as_json, end="" if isinstance(value, str) else "\n")
    finally:
        shown.stop()
        if pieces and not as_json:
            output.text("")


def show_value(value: Any, as_json: bool, end: str = "\n") -> None:
    """A value for people (text as it is) or programs."""
    if isinstance(value, str) and not as_json:
        output.raw(value, end=end)
    else:
        output.value(value)
