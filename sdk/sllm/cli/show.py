"""Views as tables."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from sllm.cli import output
from sllm_runtime.protocol.http import CallView, FunctionView, ModelView, NodeDetailView, NodeView, VersionView
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.timeline import Span

_WIDTH = 40


def _date(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def calls(found: Sequence[CallView]) -> None:
    """One row a call."""
    rows = [
        (
            view.id,
            f"{view.function} v{view.version}",
            view.state,
            view.instance or "-",
            view.gateway or "-",
            _date(view.created),
            _took(view),
            str(view.tokens or "-"),
            "yes" if view.kept else "no",
        )
        for view in found
    ]
    columns = ("CALL", "FUNCTION", "STATE", "INSTANCE", "GATEWAY", "CREATED", "TOOK", "TOKENS", "KEPT")
    output.table(columns, rows, empty="no call runs or waits, and none is kept")


def _took(view: CallView) -> str:
    """What it took, or has taken so far."""
    return f"{(view.finished or max(time.time(), view.created)) - view.created:.1f} s"


def functions(found: Sequence[FunctionView]) -> None:
    """One row a function."""
    rows = [(view.name, _active(view), str(len(view.instances)), view.url, _model(view)) for view in found]
    output.table(("NAME", "ACTIVE", "INSTANCES", "URL", "MODEL"), rows, empty="no functions yet; `sllm fn deploy FILE`")


def _active(view: FunctionView) -> str:
    if view.deleting:
        return "deleting"
    return f"v{view.active}" if view.active else "-"


def _model(view: FunctionView) -> str:
    return (view.manifest.model if view.manifest else None) or "-"


def function(view: FunctionView) -> None:
    """Everything about one function."""
    output.text(f"{view.name}  POST {view.url}" + ("  (also on /v1 of OpenAI)" if view.openai else ""))
    if view.deleting:
        output.text("  is being deleted: it takes no more calls and goes once those that run have finished")
    if view.manifest is not None:
        default = {"name", "handler", "schema_version", "description"}
        fields = view.manifest.model_dump(mode="json", exclude_defaults=True, exclude=default)
        for key, value in fields.items():
            output.text(f"  {key}: {value}")
    versions(view.versions)
    rows = [
        (
            each.instance,
            f"v{each.version}",
            each.node,
            each.state,
            _engine(each.capabilities),
            each.fingerprint[:12] or "-",
            each.error.message if each.error else "",
        )
        for each in view.instances
    ]
    columns = ("INSTANCE", "VERSION", "NODE", "STATE", "ENGINE", "NUMERICS", "ERROR")
    output.table(columns, rows, empty="no instances (scaled to zero)")


def _engine(capabilities: Sequence[str]) -> str:
    """``ours: resume, lora``; ``-`` for an instance without an engine."""
    name = next((each.removeprefix("engine:") for each in capabilities if each.startswith("engine:")), "")
    able = ", ".join(each for each in capabilities if not each.startswith("engine:"))
    return ": ".join(filter(None, (name, able))) or "-"


def versions(found: Iterable[VersionView]) -> None:
    """One row a version."""
    rows = [
        (
            f"v{each.version}",
            each.state + (" *" if each.active else ""),
            _date(each.created),
            show_bytes(each.bundle_bytes),
            (each.model or "-")[:19],
            each.error.message if each.error else "",
        )
        for each in found
    ]
    output.table(("VERSION", "STATE", "CREATED", "BUNDLE", "MODEL", "ERROR"), rows, empty="no versions")


def models(found: Sequence[ModelView], places: Mapping[str, str] | None = None) -> None:
    """One row a model. ``places``: by digest, where it lies on each node; None: which nodes have it."""
    rows = [
        (
            each.digest[7:19],
            each.architecture,
            show_bytes(each.bytes),
            each.dtype,
            ",".join(each.nodes) if places is None else places.get(each.digest, ""),
            each.uri,
        )
        for each in found
    ]
    output.table(("DIGEST", "ARCHITECTURE", "SIZE", "DTYPE", "NODES", "FROM"), rows, empty="no models yet")


def model(view: ModelView) -> None:
    """Everything about one model."""
    for name, value in (
        ("model", view.digest),
        ("from", view.uri),
        ("architecture", view.architecture if not view.adapter else f"LoRA adapter of {view.adapter}"),
        ("size", f"{show_bytes(view.bytes)} in {len(view.partitions)} partition(s), {view.tensors} tensors"),
        ("dtype", view.dtype),
        ("nodes", ", ".join(view.nodes) or "-"),
        ("used by", ", ".join(view.used_by) or "-"),
        *((("problem", view.problem),) if view.problem else ()),
    ):
        output.text(f"{name:<13} {value}")


def nodes(found: Sequence[NodeView]) -> None:
    """One row a node."""
    rows = [
        (
            each.node,
            node_state(each),
            f"{each.free_cpu:g}/{each.cpu:g}",
            f"{show_bytes(each.free_memory)}/{show_bytes(each.memory)}",
            ", ".join(gpu.kind for gpu in each.gpus) or "-",
            str(each.instances),
            str(each.pool_idle),
        )
        for each in found
    ]
    columns = ("NAME", "STATE", "CPU FREE", "MEMORY FREE", "GPUS", "INSTANCES", "WARM")
    output.table(columns, rows, empty="no nodes have joined")


def node_state(view: NodeView) -> str:
    """What matters most of it, in a word or two."""
    states = (
        (view.left, f"left {view.age_s:.0f} s ago"),
        (not view.alive, f"silent for {view.age_s:.0f} s"),
        (view.draining, "draining"),
        (view.cordoned, "cordoned"),
        (view.condition, "makes no sandboxes"),
    )
    return next((words for holds, words in states if holds), "alive")


def node(view: NodeDetailView) -> None:
    """Everything about one node."""
    nodes((view,))
    if view.cordoned and not view.alive:  # of a silent node its state does not say so
        output.text("NOTHING IS STARTED HERE: it is " + ("drained" if view.draining else "cordoned"))
    if view.condition:
        output.text(f"NOTHING IS STARTED HERE: {view.condition}")
    output.text("labels: " + (", ".join(f"{name}={value}" for name, value in sorted(view.labels.items())) or "-"))
    if view.here or not view.instances:  # a gateway of before counts them alone
        rows = [
            (each.instance, f"{each.function} v{each.version}", each.state, str(each.running)) for each in view.here
        ]
        output.table(("INSTANCE", "FUNCTION", "STATE", "CALLS"), rows, empty="no instances on this node")
    storage = view.storage
    if storage is None:
        output.text("loaderd is away: nothing is known of models and tiers")
        return
    if not storage.integrity:
        output.text("INTEGRITY IS OFF: what is loaded here is not compared with its digests")
    tiers = [
        ("dram", storage.dram_used, storage.dram_limit, f"{show_bytes(storage.dram_ready)} ready ahead"),
        ("ssd copies", storage.ssd_used, storage.ssd_limit, f"{show_bytes(storage.disk_free)} free on the disk"),
        *((each.device, each.used, each.limit, "") for each in storage.devices),
    ]
    output.table(
        ("TIER", "USED", "LIMIT", ""),
        [(name, show_bytes(used), show_bytes(limit), note) for name, used, limit, note in tiers],
        empty="",
    )
    output.table(
        ("PATH", "SPEED", "WAITING"),
        [(p.path, f"{show_bytes(p.bandwidth)}/s" if p.bandwidth else "-", show_bytes(p.queued)) for p in storage.paths],
        empty="no bytes have come by any path yet",
    )
    output.table(
        ("MODEL", "LIES IN"),
        [(digest[7:19], ", ".join(found)) for digest, found in sorted(view.tiers.items())],
        empty="no models on this node",
    )
    if view.untold:
        output.text(f"and {view.untold} more, of which its report has no room to tell")


def timeline(spans: Sequence[Span], write: Callable[[str], None] = output.note) -> None:
    """Spans as bars, on stderr unless they are what was asked for."""
    end = max((span.at + span.ms for span in spans), default=0.0) or 1.0
    for span in spans:
        before = round(_WIDTH * span.at / end)
        bar = max(1, round(_WIDTH * span.ms / end))
        write(f"  {span.name:<12} {span.ms:9.1f} ms  {' ' * before}{'█' * bar}")
