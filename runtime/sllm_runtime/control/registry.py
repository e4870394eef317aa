"""What is deployed: versions, who has the route, models and who needs them. Pure changes of the view."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import msgspec

from sllm_runtime.control.view import ROUTABLE, Key, View, without
from sllm_runtime.protocol.codec import to_json
from sllm_runtime.protocol.ctl import ModelInfo, NodeInfo
from sllm_runtime.protocol.errors import Conflict, ErrorBody, FunctionNotFound, ModelNotFound, VersionNotFound
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.records import FunctionRecord, ModelRecord, VersionRecord
from sllm_runtime.protocol.states import VERSION, VersionState, check

KEEP_FAILED: Final = 5
"""Failed versions of a function whose errors are kept."""
KEEP_RETIRED: Final = 50
"""Versions of a function that can be rolled back to, beside the active one."""
KEEP_SOURCES: Final = 16
"""Places of a model that are kept, the newest ones: each is one more to read it from again."""
KEEP_REQUESTS: Final = 8
"""Deployments of a version whose askers another controller can tell that it has the route, the newest ones; and
rollbacks of a function."""
_NEEDED: Final = frozenset({VersionState.PREPARING, *ROUTABLE})


def content(
    manifest: Manifest, bundle: str, model: str | None, adapters: Mapping[str, str] = MappingProxyType({})
) -> str:
    """Digest over manifest, bundle, model and adapters: equal content makes no new version."""
    parts = [manifest.model_dump(mode="json"), bundle, model, *([dict(adapters)] if adapters else [])]
    text = msgspec.json.encode(parts, order="sorted")
    return f"sha256:{hashlib.sha256(text).hexdigest()}"


def function_of(view: View, name: str) -> FunctionRecord:
    """Raises ``FunctionNotFound``; one that is being deleted is still there."""
    record = view.functions.get(name)
    if record is None:
        raise FunctionNotFound(f"there is no function {name!r}; `sllm fn list` shows what there is")
    return record


def present(view: View, name: str) -> FunctionRecord:
    """Raises ``FunctionNotFound``, ``Conflict`` if it is being deleted."""
    record = function_of(view, name)
    if record.deleting:
        raise Conflict(f"function {name!r} is being deleted; wait until it is gone, or delete it with --force")
    return record


def same(view: View, name: str, digest: str) -> VersionRecord | None:
    """The newest version with this content that calls may go to."""
    found = [record for record in view.versions_of(name) if record.content == digest and record.state in ROUTABLE]
    return found[-1] if found else None


def create(view: View, version: VersionRecord, model: ModelRecord | None, adapters: Iterable[ModelRecord] = ()) -> View:
    """Register a version that is being prepared, with what it needs, in one step. Raises ``Conflict``."""
    name = version.function
    function = view.functions.get(name) or FunctionRecord(function=name, active=None, last_version=0)
    if function.deleting:
        present(view, name)
    for needed in (*((model,) if model is not None else ()), *adapters):
        view = know(view, needed)
    view = view.put_function(msgspec.structs.replace(function, last_version=version.version)).put_version(version)
    return view.put_failure((name, version.version), None).put_trial((name, version.version), True)


def prune(view: View, name: str) -> View:
    """Forget the oldest retired versions above KEEP_RETIRED that no instance runs; their bundles may go."""
    function = function_of(view, name)
    retired = [record for record in view.versions_of(name) if record.state is VersionState.RETIRED]
    retired.sort(key=lambda record: record.version in function.previous[-1:])  # it had the route until now
    old = {(name, record.version) for record in retired[: max(len(retired) - KEEP_RETIRED, 0)]}
    old -= {instance.key for instance in view.instances.values()}
    if not old:
        return view
    previous = tuple(number for number in function.previous if (name, number) not in old)
    view = view.put_function(msgspec.structs.replace(function, previous=previous))
    return replace(view.drop_versions(old), failures=without(view.failures, old))


def _state(view: View, key: Key, state: VersionState) -> View:
    record = view.versions.get(key)
    if record is None:
        return view
    return view.put_version(msgspec.structs.replace(record, state=check(VERSION, record.state, state)))


def activate(view: View, key: Key, request: str = "") -> View:
    """Give the route to this version; the one that had it is retired and can be rolled back to. ``request``: of the
    deployment that asks for it, also where it has the route already."""
    function = function_of(view, key[0])
    view = view.put_trial(key, False).put_failure(key, None)
    if function.active != key[1]:
        previous = tuple(number for number in function.previous if number != key[1])
        if function.active is not None:
            previous = (*previous, function.active)
            view = _state(view, (key[0], function.active), VersionState.RETIRED)
        view = view.put_function(msgspec.structs.replace(function, active=key[1], previous=previous))
        view = _state(view, key, VersionState.ACTIVE)
    record = view.versions.get(key)
    if record is None or not request:
        return view
    requests = tuple(dict.fromkeys((*_requests(record), request)))[-KEEP_REQUESTS:]
    return view.put_version(msgspec.structs.replace(record, request=request, requests=requests))


def routed_by(view: View, request: str) -> int | None:
    """The version that got the route by this deployment."""
    found = (record for record in view.versions.values() if record.state in ROUTABLE)
    return next((record.version for record in found if request and request in _requests(record)), None)


def _requests(record: VersionRecord) -> tuple[str, ...]:
    return record.requests or tuple(filter(None, (record.request,)))


def rollback(view: View, name: str, number: int | None, request: str = "") -> View:
    """Give the route back, at once; by one ``request`` once. Raises ``VersionNotFound``, ``Conflict`` if there is
    nothing to go back to."""
    function = present(view, name)
    if request and request in (function.rolled_back, *function.rollbacks):
        return view
    if number is None:
        usable = [n for n in function.previous if view.routable((name, n)) and n != function.active]
        if not usable:
            raise Conflict(f"function {name!r} has no version to go back to; `sllm fn history {name}` shows all")
        number = usable[-1]
    if not view.routable((name, number)):
        have = ", ".join(f"v{v.version}" for v in view.versions_of(name) if v.state in ROUTABLE)
        raise VersionNotFound(f"function {name!r} has no version {number} that ever ran; there is {have or 'none'}")
    if function.active == number:
        return view.put_function(_asked(function, request)) if request else view
    kept = function.previous[: function.previous.index(number)] if number in function.previous else function.previous
    view = activate(view, (name, number))
    # Going back forgets the way: the next rollback goes further back, not forth again.
    return view.put_function(_asked(msgspec.structs.replace(view.functions[name], previous=kept), request))


def _asked(function: FunctionRecord, request: str) -> FunctionRecord:
    """``function`` with a rollback that was done, or found its version in place."""
    if not request:
        return msgspec.structs.replace(function, rolled_back="")
    asked = (*(function.rollbacks or filter(None, (function.rolled_back,))), request)[-KEEP_REQUESTS:]
    return msgspec.structs.replace(function, rolled_back=request, rollbacks=asked)


def failed(view: View, key: Key, error: ErrorBody) -> View:
    """A version that never started, with its error, whatever is kept of it."""
    record = view.versions.get(key)
    if record is None:
        return view
    return view.put_version(
        msgspec.structs.replace(record, state=check(VERSION, record.state, VersionState.FAILED), error=error)
    )


def discard(view: View, key: Key, error: ErrorBody) -> View:
    """A version that never started: FAILED with its error; of a function that never ran nothing remains, and of one
    that is being deleted what that leaves: whoever takes its name meanwhile would lose it with what is left."""
    view = _undone(view, key, error)
    kept = [record.version for record in view.versions_of(key[0]) if record.state is VersionState.FAILED]
    stale = [(key[0], number) for number in kept[:-KEEP_FAILED]]
    return view.drop_versions(stale) if stale else view


def _undone(view: View, key: Key, error: ErrorBody) -> View:
    view = view.put_trial(key, False).put_failure(key, None)
    function, record = view.functions.get(key[0]), view.versions.get(key)
    if function is None or record is None:
        return view
    if function.active is None and not function.deleting:
        return remove(view, key[0])
    return failed(view, key, error)


def withdraw(view: View, key: Key, error: ErrorBody) -> View:
    """A version whose deployment was called back: as ``discard``, and not even its error is kept."""
    view = _undone(view, key, error)
    return view.drop_versions([key])


def remove(view: View, name: str) -> View:
    """Forget a function with all its versions."""
    keys = [key for key in view.versions if key[0] == name]
    return replace(
        view.drop_versions(keys),
        functions=without(view.functions, [name]),
        failures=without(view.failures, keys),
        waiting=without(view.waiting, keys),
        callers=without(view.callers, keys),
        trials=view.trials - frozenset(keys),
    )


def unreachable(view: View, bundles: Iterable[str]) -> list[str]:
    """Which of these bundles no version needs any more."""
    needed = {record.bundle for record in view.versions.values() if record.state in _NEEDED}
    return sorted(set(bundles) - needed)


# --- models ---------------------------------------------------------------------------------------
def know(view: View, model: ModelRecord) -> View:
    """Register a model; one known by this content gains the new source."""
    known = view.models.get(model.digest)
    if known is None:
        return view.put_model(model)
    sources = tuple(dict.fromkeys((*known.sources, *model.sources, model.uri)))[-KEEP_SOURCES:]
    return view if sources == known.sources else view.put_model(msgspec.structs.replace(known, sources=sources))


def model_of(view: View, digest: str) -> ModelRecord:
    """By digest or an unambiguous beginning of its hex digits. Raises ``ModelNotFound``, ``Conflict``."""
    wanted = digest.removeprefix("sha256:")
    found = [record for name, record in view.models.items() if name.removeprefix("sha256:").startswith(wanted)]
    if not found or not wanted:
        raise ModelNotFound(f"there is no model {digest!r}; `sllm model list` shows what there is")
    if len(found) > 1:
        raise Conflict(f"{digest!r} begins the digests of {len(found)} models; give more digits")
    return found[0]


def left_of(view: View, digest: str) -> ModelRecord:
    """As ``model_of``; of a model whose record is gone what nodes report to have, or no more than its ``digest``."""
    try:
        return model_of(view, digest)
    except ModelNotFound:
        wanted = f"sha256:{digest.removeprefix('sha256:')}"
        statuses = (node.status for node in view.nodes.values() if node.status is not None)
        told = {each for status in statuses for each in (*status.models, *status.resident) if each.startswith(wanted)}
        return ModelRecord(digest=told.pop() if len(told) == 1 else wanted, uri="", nbytes=0, partitions=())


def used_by(view: View, digests: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Versions that need each of these models, as ``name:v1``."""
    needed = (record for record in view.versions.values() if record.state in _NEEDED)
    wants = ((f"{each.function}:v{each.version}", (each.model or "", *each.adapters.values())) for each in needed)
    return _by_digest(digests, wants)


def holders(view: View, digests: frozenset[str]) -> Mapping[str, tuple[str, ...]]:
    """Nodes that report to have each of these models."""
    statuses = (node.status for node in view.nodes.values() if node.status is not None)
    return _by_digest(digests, ((each.node, (*each.models, *each.resident)) for each in statuses))


def _by_digest(digests: frozenset[str], named: Iterable[tuple[str, tuple[str, ...]]]) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for name, theirs in named:
        for digest in digests.intersection(theirs):
            found.setdefault(digest, []).append(name)
    return {digest: tuple(sorted(names)) for digest, names in found.items()}


def drop_model(view: View, digest: str) -> View:
    """Forget a model. Raises ``Conflict`` while a version needs it."""
    users = used_by(view, frozenset({digest})).get(digest)
    if users:
        raise Conflict(f"model {digest[:19]} is needed by {', '.join(users)}; delete these first")
    return replace(view, models=without(view.models, [digest]))


# --- for people -----------------------------------------------------------------------------------
def model_info(view: View, record: ModelRecord, problem: str = "") -> ModelInfo:
    """A model with where it lies and who needs it."""
    (info,) = model_infos(view, [record])
    return msgspec.structs.replace(info, problem=problem)


def model_infos(view: View, records: Sequence[ModelRecord]) -> Iterator[ModelInfo]:
    """Models with where they lie and who needs them: nodes and versions are gone through once for all of them."""
    digests = frozenset(record.digest for record in records)
    nodes, users = holders(view, digests), used_by(view, digests)
    for record in records:
        digest = record.digest
        yield ModelInfo(record=record, nodes=nodes.get(digest, ()), used_by=users.get(digest, ()))


def node_info(view: View, name: str, now: float) -> NodeInfo:
    """A node with its last report. One that this controller has not heard is silent since it listens at the least."""
    node = view.nodes[name]
    age = now - (node.heard if node.heard is not None else view.listening_since)
    return NodeInfo(record=node.record, status=node.status, age_s=age, alive=view.alive(name, now), left=node.left)


def manifest_bytes(manifest: Manifest) -> int:
    """Its size as it is stored."""
    return len(to_json(manifest))
