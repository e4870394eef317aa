"""Lists for people, in pages that fit a message: any number of functions, versions, models and nodes. Pure.

A page ends where the next part would make it too large; its ``next`` is where the asker goes on. Parts are ordered by a
key that outlives them, so that what comes and goes between two pages neither repeats nor hides the rest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, TypeVar

import msgspec

from sllm_runtime.control import registry, secret_users
from sllm_runtime.control.view import Instance, View
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.ctl import FunctionInfo, FunctionList, ModelList, NodeList, SecretInfo, SecretList, joined
from sllm_runtime.protocol.limits import BATCH_BYTES
from sllm_runtime.protocol.records import FunctionRecord, VersionRecord

PAGE_BYTES: Final = BATCH_BYTES
"""At least one part is in a page: a manifest has at most ``deploy.MAX_MANIFEST`` bytes, a node's report MAX_REPORT."""

P = TypeVar("P", bound=msgspec.Struct)


def functions(view: View, after: str) -> FunctionList:
    """All functions by name, each with its active and its newest version and its live instances."""
    versions: dict[str, list[VersionRecord]] = defaultdict(list)
    for (name, number), version in view.versions.items():
        record = view.functions.get(name)
        if record is not None and number in (record.active, record.last_version):
            versions[name].append(version)
    instances = _instances(view)
    every = (_parts(view.functions[name], versions[name], instances[name]) for name in sorted(view.functions))
    parts, more = page((part for found in every for part in found), after)
    return FunctionList(functions=joined(parts), next=more)


def function(view: View, name: str, after: str = "") -> FunctionInfo:
    """One function with its versions, oldest first, and its live instances. Raises ``FunctionNotFound``."""
    record = registry.function_of(view, name)
    parts, more = page(_parts(record, view.versions_of(name), _instances(view)[name]), after)
    (info,) = joined(parts) or (FunctionInfo(record=record),)
    return msgspec.structs.replace(info, next=more)


def models(view: View, after: str) -> ModelList:
    """All models, the first registered first."""
    keyed = {f"{record.created:020.6f} {record.digest}": record for record in view.models.values()}
    keys = sorted(key for key in keyed if key > after)
    parts, more = page(zip(keys, registry.model_infos(view, [keyed[key] for key in keys]), strict=True), after)
    return ModelList(models=tuple(parts), next=more)


def nodes(view: View, after: str, now: float) -> NodeList:
    """All nodes by name, with their last reports."""
    parts, more = page(((name, registry.node_info(view, name, now)) for name in sorted(view.nodes)), after)
    return NodeList(nodes=tuple(parts), next=more)


def secrets(view: View, stored: Iterable[SecretInfo], after: str) -> SecretList:
    """All secrets by name, with the functions that have them."""
    users = secret_users.every(view)
    keyed = ((each.name, msgspec.structs.replace(each, functions=users.get(each.name, ()))) for each in stored)
    parts, more = page(keyed, after)
    return SecretList(secrets=tuple(parts), next=more)


def page(parts: Iterable[tuple[str, P]], after: str) -> tuple[list[P], str]:
    """The parts whose keys follow ``after``, at least one and at most PAGE_BYTES; and the last key, if more follow."""
    taken: list[P] = []
    last, size = "", 0
    for key, part in parts:
        if key <= after:
            continue
        size += len(codec.pack(part))
        if taken and size > PAGE_BYTES:
            return taken, last
        taken.append(part)
        last = key
    return taken, ""


def _instances(view: View) -> dict[str, list[Instance]]:
    found: dict[str, list[Instance]] = defaultdict(list)
    for instance in view.instances.values():
        if not instance.ended:
            found[instance.key[0]].append(instance)
    return found


def _parts(
    record: FunctionRecord, versions: Iterable[VersionRecord], instances: Iterable[Instance]
) -> Iterator[tuple[str, FunctionInfo]]:
    """A function piece by piece: its record, a version each, an instance each. A blank sorts before what names have."""
    name = record.function
    yield f"{name} 0", FunctionInfo(record=record)
    for version in sorted(versions, key=lambda version: version.version):
        yield f"{name} 1 {version.version:012d}", FunctionInfo(record=record, versions=(version,))
    for instance in sorted((each.record for each in instances), key=lambda each: each.instance):
        yield f"{name} 2 {instance.instance}", FunctionInfo(record=record, instances=(instance,))
