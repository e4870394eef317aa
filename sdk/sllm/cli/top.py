"""``sllm top``: nodes, devices, tiers, instances, queues and tokens, again and again."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import quote

import typer

from sllm.cli import output
from sllm.cli.context import Json, client
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.http import API, FunctionListView, NodeDetailView, NodeListView
from sllm_runtime.protocol.quantities import show_bytes

if TYPE_CHECKING:
    from sllm.client import Client

_SAMPLE: Final = re.compile(r"^(\w+)\{([^}]*)\} ([0-9.e+-]+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
CLEAR: Final = "\x1b[H\x1b[2J"


def top(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Look once. So it is where stdout is no terminal.")] = False,
    json: Json = False,
) -> None:
    """Watch the cluster."""
    with client(context) as connection:
        before: Mapping[str, float] = {}
        looked = 0.0
        while True:
            nodes, functions, counted = _looked_at(connection)
            now = time.monotonic()
            rates = {name: max(counted.get(name, 0.0) - was, 0.0) / (now - looked) for name, was in before.items()}
            if json:
                output.value(_document(nodes, functions, counted, rates))
            else:
                _draw(nodes, functions, counted, rates, clear=sys.stdout.isatty() and not once)
            if once or not sys.stdout.isatty():
                return
            before, looked = counted, now
            time.sleep(every)


def _looked_at(connection: Client) -> tuple[list[NodeDetailView], FunctionListView, dict[str, float]]:
    names = [each.node for each in NodeListView.model_validate(connection.request("GET", f"{API}/nodes")).nodes]
    details = (connection.request("GET", f"{API}/nodes/{quote(name, safe='')}") for name in names)
    nodes = [NodeDetailView.model_validate(each) for each in details]
    functions = FunctionListView.model_validate(connection.request("GET", f"{API}/functions"))
    return nodes, functions, _counted(connection)


def _counted(connection: Client) -> dict[str, float]:
    """Over all gateways of the profile; one that does not answer counts nothing now."""
    found: dict[str, float] = defaultdict(float, counts(connection.text("/metrics")))
    for other in connection.profile.urls[1:]:
        with suppress(SllmError):
            for name, count in counts(connection.text(f"{other}/metrics")).items():
                found[name] += count
    return dict(found)


def counts(metrics: str) -> dict[str, float]:
    """What a gateway counts of each function: ``queued NAME`` calls, ``tokens NAME`` of calls that have ended, and of
    those that run where it can tell."""
    found: dict[str, float] = defaultdict(float)
    for name, labels, value in _SAMPLE.findall(metrics):
        given = dict(_LABEL.findall(labels))
        function = given.get("function", "")
        if name == "sllm_queue_depth":
            found[f"queued {function}"] += float(value)
        elif name == "sllm_tokens_open" or (name == "sllm_tokens_total" and given.get("kind") == "completion"):
            found[f"tokens {function}"] += float(value)
    return dict(found)


def _document(
    nodes: list[NodeDetailView], functions: FunctionListView, counted: Mapping[str, float], rates: Mapping[str, float]
) -> dict[str, object]:
    return {
        "nodes": [each.model_dump(mode="json") for each in nodes],
        "functions": functions.model_dump(mode="json")["functions"],
        "counts": dict(counted),
        "rates": {name: rate for name, rate in rates.items() if name.startswith("tokens ")},
    }


def _draw(
    nodes: list[NodeDetailView],
    functions: FunctionListView,
    counted: Mapping[str, float],
    rates: Mapping[str, float],
    *,
    clear: bool,
) -> None:
    if clear:
        output.text(CLEAR, end="")
    columns = ("NODE", "STATE", "CPU FREE", "MEMORY FREE", "DEVICES", "DRAM", "SSD", "WAITING", "INSTANCES", "WARM")
    output.table(columns, [_node(each) for each in nodes], empty="no nodes have joined")
    rows = []
    for each in functions.functions:
        states = Counter(instance.state for instance in each.instances)
        rate = rates.get(f"tokens {each.name}")
        rows.append(
            (
                each.name,
                ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "-",
                ", ".join(sorted({instance.node for instance in each.instances})) or "-",
                f"{counted.get(f'queued {each.name}', 0.0):.0f}",
                f"{rate:.1f}" if rate is not None else "-",
            )
        )
    output.table(("FUNCTION", "INSTANCES", "ON", "QUEUED", "TOKENS/S"), rows, empty="no functions yet")


def _state(view: NodeDetailView) -> str:
    states = (
        (not view.alive, "silent"),
        (view.draining, "draining"),
        (view.cordoned, "cordoned"),
        (view.condition, "makes no sandboxes"),
    )
    return next((word for holds, word in states if holds), "alive")


def _node(view: NodeDetailView) -> tuple[str, ...]:
    used = sum(gpu.used_by is not None for gpu in view.gpus)
    storage = view.storage
    return (
        view.node,
        _state(view),
        f"{view.free_cpu:g}/{view.cpu:g}",
        f"{show_bytes(view.free_memory)}/{show_bytes(view.memory)}",
        f"{used}/{len(view.gpus)} used" if view.gpus else "-",
        f"{show_bytes(view.dram_used)}/{show_bytes(view.dram_limit)}",
        f"{show_bytes(storage.ssd_used)}/{show_bytes(storage.ssd_limit)}" if storage is not None else "-",
        show_bytes(sum(path.queued for path in storage.paths)) if storage is not None else "-",
        str(view.instances),
        str(view.pool_idle),
    )
