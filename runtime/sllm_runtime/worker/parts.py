"""A model over the processes of an instance: what each of them has of it, and who computes it together.

A stage asks loaderd for the blocks of its layers, in its own partition where each has one, a rank for its partition.
Number 0 has the engine, which drives the others (``engine.ours.driver``); each other one is a ``Follower`` of it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from sllm_loaderd.client import LoaderSession
from sllm_runtime.protocol.checkpoint import CheckpointIndex
from sllm_runtime.protocol.errors import FunctionError, InstanceLost, UnsupportedModel
from sllm_runtime.protocol.loader import CPU, place_of
from sllm_runtime.protocol.stages import LayerRange
from sllm_runtime.protocol.timeline import WEIGHTS
from sllm_runtime.protocol.worker import Assign
from sllm_runtime.worker import weights
from sllm_runtime.worker.arriving import Layers, Report, Weights, blocks_of
from sllm_runtime.worker.engine.choice import Known, Settings, backend_of, kv_room, recognise
from sllm_runtime.worker.engine.ours.follower import Follower
from sllm_runtime.worker.engine.ours.model import config as configs
from sllm_runtime.worker.engine.ours.numerics import EXACT
from sllm_runtime.worker.engine.ours.parallel.group import Group, library_of
from sllm_runtime.worker.engine.ours.parallel.ranks import Rank, Ranks, told
from sllm_runtime.worker.engine.ours.parallel.shards import build_shard, token_runs
from sllm_runtime.worker.engine.ours.pipeline.head import Pipeline
from sllm_runtime.worker.engine.ours.pipeline.stage import Stage
from sllm_runtime.worker.engine.ours.runner import Runner
from sllm_runtime.worker.engine.ours.selftest import Proof
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.joined import Joined
from sllm_runtime.worker.model import KV_SHARE, granted, start_engine
from sllm_runtime.worker.shares import layers_in, layers_of, ranges
from sllm_runtime.worker.tensors import CheckpointTensors, TypedTensors


@dataclass(frozen=True)
class Part:
    """What this process has of the model, though its bytes may still come."""

    coming: Weights
    files: Mapping[str, bytes]
    config: Mapping[str, Any]
    known: Known
    settings: Settings
    layers: LayerRange

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors of its layers."""
        return frozenset().union(*(self.known.needs[number] for number in range(self.layers.low, self.layers.high)))


# --- number 0 -------------------------------------------------------------------------------------
def head(assign: Assign, joined: Joined, fd: int, home: Path, report: Report) -> tuple[Weights, ModelHandle]:
    """The model of the loaderd session ``fd`` as a function sees it; its engine starts when it is first asked for.
    Raises what keeps this process, or another one of the instance, from its part."""
    if joined.member.stages > 1:
        part = _stage_part(assign, joined, fd)
        settings = replace(part.settings, layers=part.layers.high, runner=_pipeline(part, joined))
        if part.known.proof(settings) is None:
            part.coming.wait(report)
        else:
            part.coming.watch(report)
    else:
        try:
            part, group = _rank_part(assign, joined, fd, report)
            found, proved_s = part.known.found(part.settings)  # which all ranks make together
        except InstanceLost as error:
            if error.stage == WEIGHTS:  # this process's own loaderd has gone, of which no other one knows
                raise
            raise told(joined.edges, error) from error
        proof = msgspec.json.encode(found).decode()
        settings = replace(part.settings, proof=proof, proved_s=proved_s, runner=_ranks(part, joined, group))

    def make_module() -> Any:
        raise FunctionError(
            "model.module is in no process of an instance with parallelism; use model.generate, or one process"
        )

    def start() -> Any:
        return start_engine(lambda: part.known.engine(part.files, part.config, settings), part.files)

    return part.coming, ModelHandle(make_module, part.files, home / "model", start)


def _pipeline(part: Part, joined: Joined) -> Any:
    def make(found: Proof) -> Runner:
        return Pipeline(
            part.known.decoder,
            found.numerics,
            part.layers.high,
            joined.edges[0],
            depth=joined.member.stages,
            kv_bytes=_kv_bytes(part),
            fingerprint=part.known.mark(part.settings),
            names=part.names,
        )

    return make


def _ranks(part: Part, joined: Joined, group: Group) -> Any:
    def make(found: Proof) -> Runner:
        return Ranks(
            part.known.decoder,
            found.numerics,
            group,
            joined.edges,
            kv_bytes=_kv_bytes(part),
            fingerprint=found.numerics_class,
        )

    return make


# --- the others -----------------------------------------------------------------------------------
def follower(assign: Assign, joined: Joined, fd: int, report: Report) -> Follower:
    """This process's part of the model of the loaderd session ``fd``, ready to compute what number 0 says."""
    if joined.member.stages > 1:
        part = _stage_part(assign, joined, fd)
        part.coming.watch(report)
        return Stage(
            part.known.decoder,
            part.layers.low,
            part.layers.high,
            joined.edges[0],
            kv_bytes=_kv_bytes(part),
            fingerprint=part.known.mark(part.settings),
            names=part.names,
        )
    part, group = _rank_part(assign, joined, fd, report)
    found, _ = part.known.found(part.settings)
    return Rank(
        part.known.decoder,
        group,
        joined.edges[0],
        kv_bytes=_kv_bytes(part),
        fingerprint=found.numerics_class,
    )


# --- parts ----------------------------------------------------------------------------------------
def _stage_part(assign: Assign, joined: Joined, fd: int) -> Part:
    """The index first, then the blocks of its layers: which those are is known then. Where the model has a partition
    for each stage they are all of the stage's own, which goes to a device of its own."""
    manifest, member = assign.manifest, joined.member
    began = time.perf_counter()
    session = LoaderSession(fd, name=assign.instance)
    own = member.number if member.number in session.partitions else 0
    first = session.load(own, blocks=((0, 0),))
    try:
        index, files = first.index(manifest.startup_timeout), first.files(manifest.startup_timeout)
    finally:
        first.detach()
    config = weights.read_config(files)
    surveyed = _recognised(assign, config, _tensors(index, own))
    parted, count = len(index.partitions) > 1, surveyed.decoder.count
    layers = (
        layers_in(index, surveyed.needs, member.number) if parted else layers_of(count, member.stages, member.number)
    )
    places = [*range(layers.low, layers.high), *(() if member.number else (-1, count))]
    needs = blocks_of(index, (own,), {place: surveyed.needs[place] for place in places})
    wanted = ranges(block for place in places for _, block in needs[place])
    load = session.load(own, blocks=wanted, device=place_of(own, assign.devices) if parted else CPU)
    coming = Weights(session, [load], began, manifest.startup_timeout)
    known = _recognised(assign, config, _tensors(index, own, load.attach(coming.left).exporter()))
    # The last of what it has waits for all of it: so no row goes on before the load's end is known.
    known.decoder.arrival = Layers(coming, needs, layers.high - 1 if member.number else count)
    settings = replace(_settings(assign, session.model), gpu_bytes=granted(manifest, index.partition(own).nbytes))
    return Part(coming, files, config, known, settings, layers)


def _tensors(index: CheckpointIndex, own: int, memory: Any = b"") -> CheckpointTensors:
    """Of all partitions by name, of the ``own`` alone with its bytes in ``memory``."""
    others = {each.rank: b"" for each in index.partitions if each.rank != own}
    return CheckpointTensors(index, memory, own, beside=others)


def _recognised(assign: Assign, config: Mapping[str, Any], tensors: CheckpointTensors) -> Known:
    manifest = assign.manifest
    dtype = weights.compute_dtype(manifest.dtype, config, tensors)
    typed = TypedTensors(tensors, dtype)
    known = recognise(config, manifest.model_loader, typed, typed.shapes, dtype, tensors.devices[0])
    if known is None:
        raise _unknown(config)
    return known


def _rank_part(assign: Assign, joined: Joined, fd: int, report: Report) -> tuple[Part, Group]:
    """The rank's partition, all of it, and the ranks, met."""
    manifest, member = assign.manifest, joined.member
    coming = Weights.begin(fd, assign.instance, manifest.startup_timeout, assign.devices)
    index, files = coming.load.index(coming.left), coming.load.files(coming.left)
    config = weights.read_config(files)
    tensors = _rank_tensors(index, coming, member.number)
    dtype = weights.compute_dtype(manifest.dtype, config, tensors)
    found = configs.read(config, manifest.model_loader)
    if found is None:
        raise _unknown(config)
    coming.wait(report)
    device = tensors.devices[0]
    group = joined.group(library_of(device))
    typed, runs = TypedTensors(tensors, dtype), token_runs(index)
    decoder = build_shard(*found, typed, dtype, EXACT.rows, group, runs, backend_of(device))
    settings = replace(
        _settings(assign, f"{coming.session.model} over {member.ranks} ranks"),
        gpu_bytes=granted(manifest, index.partition(member.number).nbytes),
    )
    part = Part(coming, files, config, Known(found[0], decoder, {}), settings, LayerRange(0, decoder.count))
    return part, group


def _rank_tensors(index: CheckpointIndex, coming: Weights, rank: int) -> CheckpointTensors:
    return CheckpointTensors(index, coming.load.attach(coming.left).exporter(), rank)


def _kv_bytes(part: Part) -> int:
    return kv_room(part.known.decoder, part.layers.high - part.layers.low, part.settings)


def _settings(assign: Assign, model: str) -> Settings:
    return Settings(assign.manifest.memory // KV_SHARE, model, assign.proof, proofs=assign.proofs)


def _unknown(config: Mapping[str, Any]) -> UnsupportedModel:
    name = next(iter(config.get("architectures") or []), None) or config.get("model_type")
    return UnsupportedModel(f"{name} is of no family that runs in several processes; leave parallelism out")
