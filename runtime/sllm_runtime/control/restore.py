"""The view at the start of a controller: what the store holds, made consistent. The nodes tell the rest."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import msgspec

from sllm_runtime.control import migration
from sllm_runtime.control.changes import Write
from sllm_runtime.control.scheduling import remembered
from sllm_runtime.control.table import Table
from sllm_runtime.control.view import Instance, Node, View
from sllm_runtime.platform.state import Records, StateStore
from sllm_runtime.protocol.errors import ProtocolError
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import NodeRecord
from sllm_runtime.protocol.records import (
    FunctionRecord,
    InstanceRecord,
    LearnedRecord,
    ModelRecord,
    PoolRecord,
    Popularity,
    ProofsRecord,
    Route,
    RouteEntry,
    VersionRecord,
)
from sllm_runtime.protocol.states import InstanceState, VersionState
from sllm_runtime.protocol.subjects import LEARNED_KEY, POOL_KEY, POPULARITY_KEY, proofs_key, route_key

log = logging.getLogger(__name__)


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """All records of the state, by key."""

    functions: dict[str, FunctionRecord]
    versions: dict[str, VersionRecord]
    models: dict[str, ModelRecord]
    nodes: dict[str, NodeRecord]
    instances: dict[str, InstanceRecord]
    routes: dict[str, Route]
    learned: LearnedRecord
    proofs: dict[str, ProofsRecord]
    popularity: Popularity
    pool: PoolRecord
    unread: frozenset[str] = frozenset()
    """Keys of instances, routes and proofs that cannot be read."""


async def read(store: StateStore) -> Stored:
    """Everything in the store, of one moment. Raises ``StaleTerm``, ``Unavailable``, ``ProtocolError``."""
    records = await store.everything()
    # Not in the loop: ten thousand versions take seconds, and a lease that is not renewed meanwhile is another one's.
    return await asyncio.to_thread(_decoded, records)


def _decoded(records: Records) -> Stored:
    """What people have made must be read, or nobody leads: what is left out would be removed. Raises
    ``ProtocolError``, which names it."""
    instances = records.readable("instances.", InstanceRecord)
    routes, proofs = records.readable("routes.", Route), records.readable("proofs.", ProofsRecord)
    there = {key for prefix in ("instances.", "routes.", "proofs.") for key in records.keys(prefix)}
    return Stored(
        functions=records.list("functions.", FunctionRecord),
        versions=records.list("versions.", VersionRecord),
        models=records.list("models.", ModelRecord),
        nodes=_nodes(records),
        instances=instances,
        unread=frozenset(there - {*instances, *routes, *proofs}),
        routes=routes,
        learned=_learned(records),
        proofs=proofs,
        popularity=records.get(POPULARITY_KEY, Popularity) or Popularity(),
        pool=records.get(POOL_KEY, PoolRecord) or PoolRecord(),
    )


def _nodes(records: Records) -> dict[str, NodeRecord]:
    """That an operator has taken a node out of use stands in its record: one that cannot be read is, until somebody
    says otherwise."""
    found = records.readable("nodes.", NodeRecord)
    lost = {key: key.removeprefix("nodes.") for key in records.keys("nodes.") - found.keys()}
    for node in lost.values():
        log.error("node %s takes no starts until `sllm node uncordon %s`: whether it was to cannot be read", node, node)
    return found | {key: NodeRecord(node=node, cordoned=True) for key, node in lost.items()}


def _learned(records: Records) -> LearnedRecord:
    """What cannot be read is learned anew: expectations keep nobody from leading."""
    try:
        return records.get(LEARNED_KEY, LearnedRecord) or LearnedRecord()
    except ProtocolError as error:
        log.warning("what starts have taught is forgotten: %s", error.message)
        return LearnedRecord()


def as_stored(stored: Stored, now: float) -> View:
    """The view that these records are, as they are. Instances whose version is gone have no manifest and are left out:
    their node's report makes them strays, which are ended (``plan``)."""
    entries = {entry.instance: entry for route in stored.routes.values() for entry in route.entries}
    versions = {(record.function, record.version): record for record in stored.versions.values()}
    instances = Table(
        _adopted(record, versions[key].manifest, entries.get(record.instance), now)
        for record in stored.instances.values()
        if (key := (record.function, record.version)) in versions
    )
    view = View(
        functions={record.function: record for record in stored.functions.values()},
        versions=versions,
        models={record.digest: record for record in stored.models.values()},
        nodes={record.node: Node(record) for record in stored.nodes.values()},
        instances=instances,
        learned=remembered.learned(stored.learned, stored.proofs.values()),
        listening_since=now,
    )
    return migration.restored(view, now)


def _adopted(record: InstanceRecord, manifest: Manifest, entry: RouteEntry | None, now: float) -> Instance:
    ready = now if record.state is InstanceState.READY else None
    adopted = Instance(record=record, manifest=manifest, placed=now, adopted=True, ready_at=ready)
    return replace(adopted, spans=entry.spans) if entry else adopted


def unreferenced(stored: Stored, view: View) -> list[Write]:
    """Instances in the store that the view has left out, and what cannot be read, but for what is written anew: to be
    removed from it."""
    left_out = (key for key, record in stored.instances.items() if record.instance not in view.instances)
    written_anew = {proofs_key(*version) for version in view.versions}
    written_anew |= {route_key(*version) for version in view.versions if view.routable(version)}
    return [Write(key, None) for key in (*left_out, *sorted(stored.unread - written_anew))]


def repaired(view: View) -> View:
    """The same, made consistent: ``FunctionRecord.active`` says which version has the route; a deployment that the
    last controller did not finish is forgotten, since whoever waits for it asks again and begins it anew."""
    functions = {
        name: record
        for name, record in view.functions.items()
        if record.deleting or (record.active is not None and (name, record.active) in view.versions)
    }
    versions = {}
    for key, record in view.versions.items():
        if key[0] not in functions:
            continue
        if record.state is VersionState.PREPARING and functions[key[0]].active != key[1]:
            continue
        state = record.state
        if functions[key[0]].active == key[1]:
            state = VersionState.ACTIVE
        elif state is VersionState.ACTIVE:
            state = VersionState.RETIRED
        versions[key] = msgspec.structs.replace(record, state=state)
    instances = Table(instance for instance in view.instances.values() if instance.key in versions)
    migrations = {name: move for name, move in view.migrations.items() if name in instances}
    view = view.drop_versions((view.versions.keys() | view.learned.versions()) - versions.keys())
    return replace(view, functions=functions, versions=versions, instances=instances, migrations=migrations)
