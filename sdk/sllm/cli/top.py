"""``sllm top``: nodes, devices, tiers, instances, queues and tokens, again and again."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

import typer

from sllm.cli import output, show
from sllm.cli.context import Json, client
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.http import API, DeviceView, FunctionListView, NodeDetailListView, NodeDetailView
from sllm_runtime.protocol.quantities import show_bytes

if TYPE_CHECKING:
    from sllm.client import Client

_SAMPLE: Final = re.compile(r"^(\w+)\{([^}]*)\} ([0-9.e+-]+)$", re.MULTILINE)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_LIVE: Final = re.compile(r"^sllm_gateways ([0-9.e+]+)$", re.MULTILINE)
CLEAR: Final = "\x1b[H\x1b[2J"
SAMPLE_S: Final = 0.5
"""Between the two counts that the first rates are of."""
METRICS_S: Final = 2.0
"""A gateway that does not answer within this is left out: one that hangs takes connections, and answers none."""


def top(
    context: typer.Context,
    every: Annotated[float, typer.Option(min=0.2, max=3600.0, help="Seconds between two looks.")] = 2.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look once. So it is without --json where stdout is no terminal.")
    ] = False,
    json: Json = False,
) -> None:
    """Watch the cluster."""
    once = once or not (json or sys.stdout.isatty())
    with client(context) as connection:
        before: Look | None = None
        while True:
            try:
                if before is None and (once or json):  # what is read by programs has its rates from the beginning
                    before = _counted(connection)
                    time.sleep(SAMPLE_S)
                nodes, functions = _looked_at(connection)
                now = _counted(connection)
            except SllmError as error:
                if once or not error.retryable:
                    raise
                output.error(error, as_json=json)
            else:
                if json:
                    output.value(_document(nodes, functions, now, now.since(before)))
                else:
                    _draw(nodes, functions, now.counts, now.since(before), clear=sys.stdout.isatty() and not once)
                    if lacks := now.lacks():
                        output.note(lacks)
                before = now
            if once:
                return
            time.sleep(every)


@dataclass(frozen=True)
class Look:
    """What each gateway that answered had counted, and when. ``silent``: those that did not."""

    gateways: Mapping[str, Mapping[str, float]]
    at: float
    silent: Sequence[str] = ()
    live: int = 0
    """Gateways of the platform, as they say themselves."""

    @property
    def counts(self) -> dict[str, float]:
        """Over all that answered."""
        return _sum(self.gateways.values())

    def since(self, before: Look | None) -> dict[str, float]:
        """What came a second, at the gateways that answered both times: all that one has ever counted did not come
        since it last answered."""
        if before is None:
            return {}
        passed = self.at - before.at
        came = [
            {name: max(count - before.gateways[gateway].get(name, 0.0), 0.0) for name, count in counted.items()}
            for gateway, counted in self.gateways.items()
            if gateway in before.gateways
        ]
        return {name: count / passed for name, count in _sum(came).items()}

    def lacks(self) -> str:
        """What it leaves out, in words; empty: nothing."""
        if self.silent:
            return f"no answer of {', '.join(self.silent)}: queues and tokens are those of the other gateways"
        if self.live > len(self.gateways):
            return (
                f"queues and tokens are those of {len(self.gateways)} of {self.live} gateways: "
                "the profile has no URLs of the others"
            )
        return ""


def _sum(counted: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for each in counted:
        for name, count in each.items():
            found[name] += count
    return dict(found)


def _looked_at(connection: Client) -> tuple[tuple[NodeDetailView, ...], FunctionListView]:
    nodes = NodeDetailListView.model_validate(connection.request("GET", f"{API}/nodes", params={"detail": "true"}))
    return nodes.nodes, FunctionListView.model_validate(connection.request("GET", f"{API}/functions"))


def _counted(connection: Client) -> Look:
    """By all gateways of the profile. Raises the typed error of the last where none answers."""
    found: dict[str, dict[str, float]] = {}
    failed: dict[str, SllmError] = {}
    live = 0
    for gateway in connection.profile.urls:
        try:
            text = connection.text(f"{gateway}/metrics", within_s=METRICS_S)
        except SllmError as error:
            failed[gateway] = error
            continue
        found[gateway] = counts(text)
        live = max(live, live_gateways(text))
    if not found:
        raise list(failed.values())[-1]
    return Look(found, time.monotonic(), tuple(failed), live)


def live_gateways(metrics: str) -> int:
    """How many there are, as one of them says; 0: it does not."""
    said = _LIVE.search(metrics)
    return int(float(said[1])) if said is not None else 0


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
        elif name == "sllm_tokens_inherited_total":  # they are counted in the other two as well, and came elsewhere
            found[f"tokens {function}"] -= float(value)
    return dict(found)


def _document(
    nodes: Sequence[NodeDetailView],
    functions: FunctionListView,
    counted: Look,
    rates: Mapping[str, float],
) -> dict[str, object]:
    return {
        "nodes": [each.model_dump(mode="json") for each in nodes],
        "functions": functions.model_dump(mode="json")["functions"],
        "counts": counted.counts,
        "silent": list(counted.silent),
        "gateways": counted.live or len(counted.gateways),
        "rates": {name: rate for name, rate in rates.items() if name.startswith("tokens ")},
    }


def _draw(
    nodes: Sequence[NodeDetailView],
    functions: FunctionListView,
    counted: Mapping[str, float],
    rates: Mapping[str, float],
    *,
    clear: bool,
) -> None:
    if clear:
        output.raw(CLEAR, end="")
    columns = (
        "NODE",
        "STATE",
        "CPU FREE",
        "MEMORY FREE",
        "DEVICES",
        "ON DEVICES",
        "DRAM",
        "SSD",
        "WAITING",
        "INSTANCES",
        "WARM",
    )
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


def _node(view: NodeDetailView) -> tuple[str, ...]:
    used = sum(gpu.used_by is not None for gpu in view.gpus)
    storage = view.storage
    return (
        view.node,
        show.node_state(view),
        f"{view.free_cpu:g}/{view.cpu:g}",
        f"{show_bytes(view.free_memory)}/{show_bytes(view.memory)}",
        f"{used}/{len(view.gpus)} used" if view.gpus else "-",
        _on_devices(storage.devices) if storage is not None and storage.devices else "-",
        f"{show_bytes(view.dram_used)}/{show_bytes(view.dram_limit)}",
        f"{show_bytes(storage.ssd_used)}/{show_bytes(storage.ssd_limit)}" if storage is not None else "-",
        show_bytes(sum(path.queued for path in storage.paths)) if storage is not None else "-",
        str(view.instances),
        str(view.pool_idle),
    )


def _on_devices(devices: Sequence[DeviceView]) -> str:
    """Weights in the memory of all of a node's devices."""
    return f"{show_bytes(sum(each.used for each in devices))}/{show_bytes(sum(each.limit for each in devices))}"
