"""Clusters for policies: nodes with disks and models on them, written in a line each."""

from __future__ import annotations

import random

import msgspec

from benchmarks.scheduler_cluster import NOW, request, started
from sllm_runtime.control.placement import Decision, Place, Policy
from sllm_runtime.control.reports import observe
from sllm_runtime.control.view import View
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import Gpu, NodeStatus, PathLoad
from sllm_runtime.protocol.records import ModelRecord
from tests.unit.control.world import GIB, deployed, manifest

__all__ = ["GB", "NOW", "cluster", "function", "idle", "model", "node", "place", "queued"]
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


def idle(
    view: View, name: str, where: str, gpu: int = 0, idle_s: float = 100.0, running: int = 0, *, carries: bool = False
) -> View:
    """``view`` with an instance of function ``name`` on ``where`` that holds accelerator ``gpu``."""
    ident = f"{name}-on-{where}-{gpu}"
    return started(view, (name, 1), Place(where, (gpu,)), ident, running=running, idle_s=idle_s, carries=carries)


def place(policy: Policy, view: View, name: str) -> Decision:
    return policy.place(request(view, (name, 1)), view, NOW, random.Random(1))
