"""Commands that are imported only when named: ``sllm --help`` stays quick, and rooms that are not installed say so."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import typer
from typer.core import TyperGroup

from sllm.cli.interrupt import Interrupted
from sllm.local import lacking
from sllm_runtime.protocol.errors import Unavailable

GROUP: Final = "sllm.commands"
EXTRAS: Final = {"up": "server", "down": "server", "convert": "server,worker"}
"""Verbs of other rooms, and the extras that bring each."""
SUMMARIES: Final = {
    "up": "Start the platform on this machine.",
    "down": "Stop the platform that `sllm up --detach` started.",
    "run": "Run one call of a function here, without a platform.",
    "fn": "Deploy, call and look after functions.",
    "model": "Convert, register and look after models.",
    "node": "Look at the cluster's nodes.",
    "secret": "Store secrets for functions.",
    "call": "Look at calls that run, wait or are kept, and cancel calls.",
    "migrate": "Move the running calls of an instance to another node.",
    "explain": "Say why a function or an open call runs where it does.",
    "events": "Show what happened.",
    "top": "Watch the cluster.",
    "doctor": "Check this machine and say what to do.",
    "profile": "Where platforms are and how to be let in.",
    "convert": "Write a model as a loading-optimised checkpoint.",
}


def contributed(prefix: str) -> dict[str, EntryPoint]:
    """Entry points of other rooms below ``prefix``: ``""`` for the root, ``"model"`` for ``sllm model``."""
    found = {}
    for point in entry_points(group=GROUP):
        group, _, verb = point.name.rpartition(".")
        if group == prefix:
            found[verb] = point
    return found


class LazyGroup(TyperGroup):
    """A group whose members are ``module:attribute`` texts or entry points."""

    members: Mapping[str, str] = {}
    order: tuple[str, ...] = ()
    prefix: str = ""

    @classmethod
    def of(cls, members: Mapping[str, str], *, order: tuple[str, ...] = (), prefix: str = "") -> type[LazyGroup]:
        """A group class with these members."""
        return type("Lazy", (cls,), {"members": members, "order": order, "prefix": prefix})

    def list_commands(self, ctx: Any) -> list[str]:
        names = {*super().list_commands(ctx), *self.members, *contributed(self.prefix)}
        return [name for name in self.order if name in names] + sorted(names - set(self.order))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        if cmd_name in self.members:
            module, _, attribute = self.members[cmd_name].partition(":")
            return _command(getattr(import_module(module), attribute), cmd_name)
        point = contributed(self.prefix).get(cmd_name)
        try:
            return _command(_load(point), cmd_name) if point is not None else None
        except Unavailable:
            if ctx.resilient_parsing:  # a shell that completes looks at every verb, and what is not here it offers not
                return None
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:  # before typer makes an empty line and `Abort` of it
            raise Interrupted("interrupted; what was asked for before may be done") from error

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        rows = []
        for name in self.list_commands(ctx):
            known = SUMMARIES.get(name) if name in self.members or name in contributed(self.prefix) else None
            command = None if known else self.get_command(ctx, name)
            rows.append((name, known or (command.get_short_help_str() if command else "")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def _load(point: EntryPoint) -> Any:
    try:
        return point.load()
    except ModuleNotFoundError as error:
        extra = EXTRAS.get(point.name.rpartition(".")[2], "server")
        raise lacking(f"`sllm {point.name.replace('.', ' ')}`", error, extra) from error


def load_contributed(prefix: str, verb: str) -> Any:
    """The function or app that another room contributes. Raises ``Unavailable`` naming the extra that brings it."""
    point = contributed(prefix).get(verb)
    if point is None:
        raise Unavailable(f"`sllm {prefix} {verb}` needs the extra: pip install 'sllm[{EXTRAS.get(verb, 'server')}]'")
    return _load(point)


def _command(found: Any, name: str) -> Any:
    if not isinstance(found, typer.Typer):
        function, found = found, typer.Typer(add_completion=False, rich_markup_mode=None)
        found.command(name)(function)
    command = typer.main.get_command(found)
    command.name = name
    return command
