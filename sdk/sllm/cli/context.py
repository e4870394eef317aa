"""What every verb gets from the root: which platform to talk to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sllm.client import Client

Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@dataclass(frozen=True)
class Target:
    """The root's flags; environment and files fill what is ``None``."""

    url: str | None = None
    token: str | None = None
    profile: str | None = None

    def client(self, *, quiet: bool = False) -> Client:
        """A client of the chosen platform. Use it as a context manager. Unless ``quiet`` it says what it waits for."""
        from sllm.cli.patient import Patient
        from sllm.client import Client

        return (Client if quiet else Patient)(self.url, self.token, profile=self.profile)


def client(context: typer.Context) -> Client:
    """The client for a verb's context."""
    target = context.find_object(Target) or Target()
    return target.client(quiet=bool(context.params.get("json")))
