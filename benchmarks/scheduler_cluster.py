"""A large cluster for the scheduler's benchmark: nodes with eight accelerators, models spread over their SSDs."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

import msgspec

from sllm_runtime.control.placement import Place, Request
from sllm_runtime.control.scheduling.learned import Learned, Recent
from sllm_runtime.control.view import CARRIES, Instance, Key, Node, View
from sllm_runtime.protocol.loader import DISK
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import Gpu, InstanceStatus, NodeRecord, NodeStatus, PathLoad
from sllm_runtime.protocol.records import FunctionRecord, InstanceRecord, ModelRecord, VersionRecord
from sllm_runtime.protocol.states import InstanceState, VersionState

NOW: Final = 1000.0
GPUS: Final = 8
COPIES: Final = 4
"""Nodes whose SSD has a model; one of them has it in DRAM as well."""
CALL_S: Final = 60.0
"""That calls take at most."""
SEED: Final = 1
"""Of the cluster that two processes make each for itself."""
_GB: Final = 10**9
_GIB: Final = 2**30


def cluster(nodes: int, models: int, rng: random.Random, keep_alive: float = 60.0) -> tuple[View, list[Key]]:
    """The cluster with nothing running, and its versions: one function for each model."""
    records = [_model(number, rng) for number in range(models)]
    ssd: dict[int, list[str]] = {number: [] for number in range(nodes)}
    dram: dict[int, list[str]] = {number: [] for number in range(nodes)}
    for record in records:
        homes = rng.sample(range(nodes), min(COPIES, nodes))
        for home in homes:
            ssd[home].append(record.digest)
        dram[homes[0]].append(record.digest)
    versions = {
        (f"f{number}", 1): _version(f"f{number}", record.digest, keep_alive) for number, record in enumerate(records)
    }
    there = [_node(number, tuple(ssd[number]), tuple(dram[number]), rng) for number in range(nodes)]
    view = View(
        functions={name: FunctionRecord(function=name, active=1, last_version=1) for name, _ in versions},
        versions=versions,
        models={record.digest: record for record in records},
        nodes={node.record.node: node for node in there},
        learned=_learned(versions, rng),
        listening_since=NOW,
    )
    return view, list(versions)


def _learned(keys: Iterable[Key], rng: random.Random) -> Learned:
    """How long calls of each version take is known."""
    return Learned(calls={key: Recent.of((rng.uniform(1.0, CALL_S),)) for key in keys})


def _model(number: int, rng: random.Random) -> ModelRecord:
    nbytes = rng.randrange(1, 40) * _GB
    return ModelRecord(digest=f"sha256:{number}", uri=f"s3://models/{number}", nbytes=nbytes, partitions=(nbytes,))


def _version(name: str, model: str, keep_alive: float) -> VersionRecord:
    handler = {"entry": "m:f", "kind": "generator", "streams": True}
    fields = {"name": name, "handler": handler, "gpu": "H100", "memory": _GIB, "max_instances": 8}
    fields |= {"engine": True, "model": model, "concurrency": 1, "keep_alive": keep_alive}
    manifest = Manifest.model_validate(fields)
    return VersionRecord(
        function=name,
        version=1,
        manifest=manifest,
        bundle="sha256:b",
        bundle_bytes=1,
        content="c",
        model=model,
        state=VersionState.ACTIVE,
    )


def _node(number: int, ssd: tuple[str, ...], dram: tuple[str, ...], rng: random.Random) -> Node:
    name = f"n{number:04}"
    paths = (
        PathLoad(path=DISK, bandwidth=5e9, queued=rng.randrange(4) * 10 * _GB),
        PathLoad(path="s3 models", bandwidth=1e9, queued=rng.randrange(2) * 10 * _GB),
    )
    status = NodeStatus(
        node=name,
        boot=name,
        sequence=1,
        term=1,
        cpu=128.0,
        memory=4096 * _GIB,
        free_cpu=128.0,
        free_memory=4096 * _GIB,
        gpus=tuple(Gpu(index=index, kind="H100", memory=80 * _GIB) for index in range(GPUS)),
        pool_idle=GPUS,
        models=ssd,
        resident=dram,
        paths=paths,
    )
    return Node(record=NodeRecord(node=name), status=status, heard=NOW)


def request(view: View, key: Key) -> Request:
    """What a call of ``key`` asks the policy."""
    version = view.versions[key]
    return Request(key, version.manifest, version.model)


def started(
    view: View, key: Key, place: Place, ident: str, *, running: int = 1, idle_s: float = 0.0, carries: bool = False
) -> View:
    """With the instance that was placed; its node has reported it ready, with ``running`` calls. ``carries``: these can
    go on elsewhere."""
    able = (CARRIES,) if carries else ()
    record = InstanceRecord(
        instance=ident, function=key[0], version=key[1], node=place.node, state=InstanceState.READY, capabilities=able
    )
    seen = InstanceStatus(
        instance=ident, function=key[0], version=key[1], state=InstanceState.READY, running=running, idle_s=idle_s
    )
    made = Instance(
        record=record,
        manifest=view.versions[key].manifest,
        placed=0.0,
        gpus=place.gpus,
        seen=seen,
        seen_at=NOW,
        busy_since=NOW - 10.0 if running else None,
        turn_since=NOW if running else None,
        ready_at=0.0,
    )
    known = view.nodes[place.node]
    assert known.status is not None
    gpus = tuple(
        msgspec.structs.replace(gpu, used_by=ident) if gpu.index in place.gpus else gpu for gpu in known.status.gpus
    )
    status = msgspec.structs.replace(known.status, gpus=gpus, instances=(*known.status.instances, seen))
    return view.put_instance(made).put_node(replace(known, status=status))


def ended(view: View, instance: Instance) -> View:
    """Without an instance; its node has reported that too."""
    name = instance.record.instance
    known = view.nodes[instance.record.node]
    assert known.status is not None
    gpus = tuple(
        msgspec.structs.replace(gpu, used_by=None) if gpu.used_by == name else gpu for gpu in known.status.gpus
    )
    left = tuple(status for status in known.status.instances if status.instance != name)
    status = msgspec.structs.replace(known.status, gpus=gpus, instances=left)
    view = replace(view, instances=view.instances.without([name]))
    return view.put_node(replace(known, status=status))
