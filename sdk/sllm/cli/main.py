"""Assembly of the command line, and the one place where an error becomes an exit status."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from sllm import __version__
from sllm.cli import output, streams
from sllm.cli.context import Target
from sllm.cli.interrupt import Interrupted
from sllm.cli.lazy import LazyGroup
from sllm_runtime.protocol.errors import InternalError, SllmError

USAGE: Final[type[Exception]] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
"""Wrong usage of any kind (typer names only its most special case)."""

app = typer.Typer(
    cls=LazyGroup.of(
        {
            "fn": "sllm.cli.fn:app",
            "model": "sllm.cli.model:app",
            "node": "sllm.cli.node:app",
            "call": "sllm.cli.call:app",
            "migrate": "sllm.cli.migrate:migrate",
            "explain": "sllm.cli.explain:explain",
            "secret": "sllm.cli.secret:app",
            "events": "sllm.cli.events:events",
            "top": "sllm.cli.top:top",
            "run": "sllm.cli.run:run",
            "doctor": "sllm.cli.doctor:doctor",
            "profile": "sllm.cli.profile:app",
        },
        order=(
            *("up", "down", "fn", "model", "node", "secret", "call", "migrate", "explain", "events", "top", "run"),
            *("doctor", "profile"),
        ),
    ),
    name="sllm",
    help="A function runtime for models: deploy a model as a Python function, call it over HTTP.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _version(asked: bool) -> None:
    if asked:
        output.text(f"sllm {__version__}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    url: Annotated[str | None, typer.Option(help="The gateway (environment: SLLM_URL).")] = None,
    token: Annotated[str | None, typer.Option(help="Its bearer token (environment: SLLM_TOKEN).")] = None,
    profile: Annotated[str | None, typer.Option(help="A profile of profiles.toml (environment: SLLM_PROFILE).")] = None,
    version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Say which.")] = False,
) -> None:
    """A function runtime for models: deploy a model as a Python function, call it over HTTP."""
    context.obj = Target(url, token, profile)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0, an error's own status, 2 for wrong usage, 130 for Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    streams.prepare()
    as_json = "--json" in words[: words.index("--") if "--" in words else None]
    sys.exit(_run(words, as_json))


def _run(words: list[str], as_json: bool) -> int:
    try:
        status = typer.main.get_command(app).main(words, prog_name="sllm", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except SllmError as error:
        output.error(error, as_json=as_json)
        return error.exit_code
    except typer.Exit as stop:
        if isinstance(stop.__cause__, KeyboardInterrupt):  # typer has caught it while it read the options
            output.error(Interrupted("interrupted"), as_json=as_json)
        return stop.exit_code
    except USAGE as error:
        output.usage(error, as_json=as_json)
        return 2
    except (KeyboardInterrupt, typer.Abort):
        output.error(Interrupted("interrupted"), as_json=as_json)
        return Interrupted.exit_code
    except BrokenPipeError:
        streams.close_stdout()
        return 1
    except OSError as error:
        output.error(InternalError(f"{type(error).__name__}: {error}"), as_json=as_json)
        return InternalError.exit_code
    except Exception as error:  # a bug, or a gateway whose answers are not ours
        if not as_json:
            output.note(traceback.format_exc().rstrip())
        output.error(InternalError(f"{type(error).__name__}: {error}"), as_json=as_json)
        return InternalError.exit_code
