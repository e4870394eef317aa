"""Clusters for policies: nodes with disks and models on them, written in a line each."""

from __future__ import annotations

import random
from dataclasses import replace

import msgspec

from sllm_runtime.control.placement import Decision, Policy, Request
from sllm_runtime.control.reports import observe
from sllm_runtime.control.view import Instance, View
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import Gpu, InstanceStatus, NodeStatus, PathLoad
from sllm_runtime.protocol.records import InstanceRecord, ModelRecord
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import GIB, deployed, manifest

NOW = 1000.0
GB = 10**9


def model(name: str, nbytes: int = GB) -> ModelRecord:
    return ModelRecord(digest=f"sha256:{name}", uri=f"s3://models/{name}", nbytes=nbytes, partitions=(nbytes,))


def node(name: str, *, gpus: int = 1, kind: str = "L4", **fields: object) -> NodeStatus:
    """A node with nothing on it, a disk of 1 GB/s, an object store of 0.1 GB/s and a warm sandbox."""
    status = NodeStatus(
        node=name,
        boot=name,
        sequence=1,
        term=1,
        cpu=16.0,
        memory=64 * GIB,
        free_cpu=16.0,
        free_memory=64 * GIB,
        gpus=tuple(Gpu(index=index, kind=kind, memory=24 * GIB) for index in range(gpus)),
        pool_idle=1,
        paths=(
            PathLoad(path="disk", bandwidth=1e9, queued=0),
            PathLoad(path="s3 models", bandwidth=1e8, queued=0),
        ),
    )
    return msgspec.structs.replace(status, **fields)


def queued(status: NodeStatus, path: str, nbytes: int) -> NodeStatus:
    """``status`` with ``nbytes`` waiting on ``path``."""
    paths = tuple(msgspec.structs.replace(p, queued=nbytes) if p.path == path else p for p in status.paths)
    return msgspec.structs.replace(status, paths=paths)


def cluster(*nodes: NodeStatus, models: tuple[ModelRecord, ...] = ()) -> View:
    view = View()
    for record in models:
        view = view.put_model(record)
    for status in nodes:
        view = observe(view, status, NOW, 0.0)
    return view


def function(view: View, name: str, record: ModelRecord | None = None, **fields: object) -> tuple[View, Manifest]:
    """``view`` with an active version of function ``name`` that wants one L4."""
    what = manifest(name, gpu=["L4"], **fields)
    view = deployed(view, what)
    if record is not None:
        version = view.versions[(name, 1)]
        view = view.put_version(msgspec.structs.replace(version, model=record.digest))
    return view, what


def idle(view: View, name: str, where: str, gpu: int = 0, idle_s: float = 100.0, running: int = 0) -> View:
    """``view`` with an instance of function ``name`` on ``where`` that holds accelerator ``gpu``."""
    what = view.versions[(name, 1)].manifest
    ident = f"{name}-on-{where}-{gpu}"
    record = InstanceRecord(instance=ident, function=name, version=1, node=where, state=InstanceState.READY)
    seen = InstanceStatus(
        instance=ident, function=name, version=1, state=InstanceState.READY, idle_s=idle_s, running=running
    )
    made = Instance(record=record, manifest=what, placed=0.0, gpus=(gpu,), seen=seen, seen_at=NOW, ready_at=0.0)
    view = view.put_instance(made)
    known = view.nodes[where]
    assert known.status is not None
    gpus = tuple(msgspec.structs.replace(g, used_by=ident) if g.index == gpu else g for g in known.status.gpus)
    status = msgspec.structs.replace(known.status, gpus=gpus, instances=(*known.status.instances, seen))
    return view.put_node(replace(known, status=status))


def place(policy: Policy, view: View, name: str) -> Decision:
    version = view.versions[(name, 1)]
    return policy.place(Request((name, 1), version.manifest, version.model), view, NOW, random.Random(1))
