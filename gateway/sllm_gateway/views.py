"""Records of the control plane as ``/api/v1`` shows them. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from sllm_runtime.protocol.calls import CallTold, Journaled
from sllm_runtime.protocol.ctl import FunctionInfo, Migrated, ModelInfo, NodeInfo, Placements, Warmed
from sllm_runtime.protocol.errors import ErrorBody
from sllm_runtime.protocol.events import LogRecord
from sllm_runtime.protocol.http import (
    CallView,
    DeviceView,
    ErrorView,
    FunctionView,
    GpuView,
    HereView,
    InstanceView,
    LogView,
    MigrationView,
    ModelView,
    NodeDetailView,
    NodeView,
    PathView,
    PlacedView,
    PlacementView,
    ProgressView,
    StorageView,
    UsageView,
    VersionView,
    WarmView,
)
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus, Progress
from sllm_runtime.protocol.records import InstanceRecord, ModelRecord, VersionRecord
from sllm_runtime.protocol.states import CALL, INSTANCE, CallState, final


def error(body: ErrorBody | None) -> ErrorView | None:
    if body is None:
        return None
    return ErrorView(code=body.code, message=body.message, retryable=body.retryable, field=body.field, stage=body.stage)


def progress(of: Progress) -> ProgressView:
    return ProgressView(stage=of.stage, done=of.done, total=of.total, unit=of.unit, message=of.message)


def version(record: VersionRecord, active: int | None) -> VersionView:
    return VersionView(
        version=record.version,
        state=record.state.value,
        active=record.version == active,
        bundle=record.bundle,
        bundle_bytes=record.bundle_bytes,
        model=record.model,
        created=record.created,
        error=error(record.error),
    )


def instance(record: InstanceRecord) -> InstanceView:
    return InstanceView(
        instance=record.instance,
        version=record.version,
        node=record.node,
        state=record.state.value,
        error=error(record.error),
        fingerprint=record.fingerprint,
        capabilities=record.capabilities,
    )


def function(info: FunctionInfo) -> FunctionView:
    """The manifest shown is the active version's, else the newest."""
    record = info.record
    shown = next((v for v in info.versions if v.version == record.active), info.versions[-1] if info.versions else None)
    manifest = shown.manifest if shown else None
    return FunctionView(
        name=record.function,
        active=record.active,
        url=f"/fn/{record.function}",
        streams=manifest.handler.streams if manifest else False,
        openai=manifest.engine if manifest else False,
        deleting=record.deleting,
        manifest=manifest,
        versions=tuple(version(v, record.active) for v in info.versions),
        instances=tuple(instance(i) for i in info.instances),
    )


def model(info: ModelInfo | ModelRecord) -> ModelView:
    record = info if isinstance(info, ModelRecord) else info.record
    view = ModelView(
        digest=record.digest,
        uri=record.uri,
        bytes=record.nbytes,
        partitions=record.partitions,
        architecture=record.architecture,
        tensors=record.tensors,
        dtype=record.dtype,
        adapter=record.adapter,
    )
    if isinstance(info, ModelRecord):
        return view
    return view.model_copy(update={"nodes": info.nodes, "used_by": info.used_by, "problem": info.problem})


def placement(found: Placements) -> PlacementView:
    return PlacementView(
        models=tuple(
            PlacedView(
                model=each.model,
                bytes=each.nbytes,
                popularity=round(each.popularity, 3),
                wanted=each.wanted,
                there=each.there,
            )
            for each in found.models
        )
    )


def migration(found: Migrated) -> MigrationView:
    return MigrationView(
        instance=found.instance,
        destination=found.destination,
        node=found.node,
        state=found.state,
        running=found.running,
        note=found.note,
    )


def warmed(found: Warmed) -> WarmView:
    return WarmView(
        function=found.function,
        version=found.version,
        wanted=found.wanted,
        ready=found.ready,
        progress=progress(found.progress) if found.progress is not None else None,
    )


def node(info: NodeInfo) -> NodeView:
    view = NodeView(
        node=info.record.node,
        alive=info.alive,
        left=info.left,
        cordoned=info.record.cordoned,
        draining=info.record.draining,
        age_s=info.age_s,
        cpu=0,
        free_cpu=0,
        memory=0,
        free_memory=0,
    )
    if info.status is None:
        return view
    return view.model_copy(update={**_reported(info.status), "draining": view.draining or info.status.draining})


def node_detail(info: NodeInfo) -> NodeDetailView:
    """A node with what lies where on it."""
    view = NodeDetailView(**node(info).model_dump())
    status = info.status
    if status is None:
        return view
    dram, away = frozenset(status.resident), frozenset(status.remote)
    tiers = {
        digest: (*(("dram",) if digest in dram else ()), "source" if digest in away else "ssd")
        for digest in status.models
    }
    here = tuple(
        HereView(
            instance=each.instance,
            function=each.function,
            version=each.version,
            state=each.state.value,
            running=each.running,
        )
        for each in _here(status)
    )
    return view.model_copy(update={"storage": _storage(status), "tiers": tiers, "here": here})


def _here(status: NodeStatus) -> Iterator[InstanceStatus]:
    """Its instances that have not ended."""
    return (each for each in status.instances if not final(INSTANCE, each.state))


def _storage(status: NodeStatus) -> StorageView | None:
    found = status.storage
    if found is None:
        return None
    return StorageView(
        dram_used=status.dram_used,
        dram_limit=status.dram_limit,
        dram_ready=found.dram_ready,
        ssd_used=found.ssd_used,
        ssd_limit=found.ssd_limit,
        disk_free=found.disk_free,
        integrity=found.integrity,
        devices=tuple(DeviceView(device=each.device, limit=each.limit, used=each.used) for each in found.devices),
        paths=tuple(PathView(path=p.path, bandwidth=p.bandwidth, queued=p.queued) for p in status.paths),
    )


def _reported(status: NodeStatus) -> dict[str, object]:
    gpus = tuple(GpuView(index=g.index, kind=g.kind, memory=g.memory, used_by=g.used_by) for g in status.gpus)
    return {
        "cpu": status.cpu,
        "free_cpu": status.free_cpu,
        "memory": status.memory,
        "free_memory": status.free_memory,
        "gpus": gpus,
        "labels": status.labels,
        "pool_idle": status.pool_idle,
        "condition": status.condition,
        "models": len(status.models),
        "resident": len(status.resident),
        "untold": status.untold,
        "dram_used": status.dram_used,
        "dram_limit": status.dram_limit,
        "instances": sum(1 for _ in _here(status)),
    }


def log_line(record: LogRecord) -> LogView:
    return LogView(
        at=record.at,
        version=record.version,
        instance=record.instance,
        node=record.node,
        stream=record.stream,
        text=record.text,
        level=record.level,
        call=record.call,
        dropped=record.dropped,
    )


def state(journaled: Journaled, told: CallTold | None) -> CallState:
    """Of a kept call; ``told`` as of ``call``."""
    open_ = journaled.ended is None and told is not None and not final(CALL, told.state)
    return told.state if open_ and told is not None else journaled.state


def call(journaled: Journaled, told: CallTold | None = None) -> CallView:
    """A kept call, without its result; ``told``: what the gateway says that has it open. That it waits again, since its
    instance died, the gateway alone knows."""
    order, ended = journaled.order, journaled.ended
    assert order is not None
    usage = ended.usage if ended is not None else None
    # A gateway's clock may be set back meanwhile, or another gateway's be behind.
    began = max(journaled.began.at, order.created) if journaled.began is not None else None
    return CallView(
        id=order.call,
        function=order.function,
        version=order.version,
        state=state(journaled, told).value,
        created=order.created,
        started=began,
        finished=max(ended.at, began or order.created) if ended is not None else None,
        usage=UsageView(prompt=usage.prompt, completion=usage.completion, cached=usage.cached) if usage else None,
        error=error(ended.error) if ended is not None else None,
        instance=told.instance if told is not None else journaled.began.instance if journaled.began is not None else "",
        gateway=order.gateway,
        tokens=told.tokens if told is not None else usage.completion if usage is not None else 0,
        waits=told.waits if told is not None else "",
    )


def open_call(told: CallTold) -> CallView:
    """A call that is not kept, as its gateway tells it."""
    return CallView(
        id=told.call,
        function=told.function,
        version=told.version,
        state=told.state.value,
        created=told.created,
        kept=False,
        instance=told.instance,
        gateway=told.gateway,
        tokens=told.tokens,
        waits=told.waits,
    )
