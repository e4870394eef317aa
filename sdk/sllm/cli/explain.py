"""``sllm explain``: why a function, or a call, runs or ran where it does."""

from __future__ import annotations

from typing import Annotated

import typer

from sllm import transport
from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm_runtime.protocol.http import API, ExplainView
from sllm_runtime.protocol.timeline import parse_comment


def explain(
    context: typer.Context,
    what: Annotated[str, typer.Argument(help="A function's name, or the id of a call.")],
    json: Json = False,
) -> None:
    """Say where it would start and why, what each node would cost, and what its starts took. Of a call: where its
    instance was started and why, what each node would have cost then, and what it took in the end."""
    path = f"{API}/explain/{transport.segment(what, 'function or call')}"
    with client(context) as connection:
        found = ExplainView.model_validate(connection.request("GET", path))
    if json:
        output.value(found.model_dump(mode="json"))
        return
    if found.call is not None:
        state = f"is {found.state}" if found.state else "is no longer known to any gateway, nor how it ended"
        where = f"{'' if found.state else '; it was'} on {found.instance}" if found.instance else ""
        output.text(f"call {found.call} {state}{where}")
        if found.error or found.waits:
            output.text(found.error or output.one_line(f"it waits: {found.waits}"))
        if found.timeline:  # else it is known by what was told of it alone
            show.timeline(parse_comment(found.timeline), output.text)
    output.text(f"{found.function} v{found.version}: {_decided(found)}")
    for move in found.moves:
        output.text(
            f"makes room: {move.instance} from {move.node or '?'} to {move.to}, {move.state.lower()}, "
            f"expected to take {_seconds(move.seconds)}, took {_seconds(move.took)}"
        )
    if found.pending:
        output.text(output.one_line(f"one is wanted and waits: {found.pending}"))
    rows = [
        (
            each.node + (" *" if each.node == found.node else ""),
            _seconds(each.seconds),
            each.expected,
            each.why,
            "; ".join(f"{way.by}: {_seconds(way.seconds)}" for way in each.ways),
        )
        for each in found.candidates
    ]
    since = "NOT THEN, SINCE" if found.past else "NOT NOW, SINCE"
    empty = "what each node would have cost is no longer known" if found.past else "no nodes have joined"
    output.table(("NODE", "START", "EXPECTED", since, "READY AFTER"), rows, empty=empty)
    started = [
        (each.instance, each.node, each.state or "gone", _seconds(each.seconds), _seconds(each.took), each.expected)
        for each in found.starts
    ]
    columns = ("INSTANCE", "NODE", "STATE", "EXPECTED", "TOOK", "OF")
    output.table(columns, started, empty="no instances (scaled to zero)")
    if found.outcomes:
        came = [
            (each.what, each.instance, each.node, _seconds(each.expected), _seconds(each.took))
            for each in found.outcomes
        ]
        output.table(("PREDICTION", "INSTANCE", "NODE", "EXPECTED", "TOOK"), came, empty="")


def _decided(found: ExplainView) -> str:
    if found.past and not found.starts:  # its function is gone, and so is what it was started by
        return found.decision
    what_for = f"its instance {found.starts[0].instance} was" if found.past else "one more instance now would be"
    return f"{what_for} {found.decision} ({found.policy})"


def _seconds(value: float | None) -> str:
    return f"{value:.2f} s" if value is not None else "-"
