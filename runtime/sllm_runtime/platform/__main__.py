"""``python -m sllm_runtime.platform up|down``: the commands without the rest of the CLI."""

from __future__ import annotations

import sys

import msgspec
import typer

from sllm_runtime.platform.commands import down, up
from sllm_runtime.protocol.errors import SllmError

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command("up")(up)
app.command("down")(down)


def main() -> int:
    """The exit status. An error is one line on stderr, JSON with ``--json``."""
    try:
        status = app(standalone_mode=False)
    except SllmError as error:
        body = {"error": msgspec.to_builtins(error.body())}
        text = msgspec.json.encode(body).decode() if "--json" in sys.argv else f"error: {error.message}"
        sys.stderr.write(text + "\n")
        return error.exit_code
    return status if isinstance(status, int) else 0


if __name__ == "__main__":
    sys.exit(main())
