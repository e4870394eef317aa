"""Whether the cluster could hold all instances that are to run without a caller (``min_instances``). Pure."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from sllm_runtime.control.fits import Capacity, Need, free, need_in, total
from sllm_runtime.control.providing.packing import empty, fitting
from sllm_runtime.control.view import Key, View


def crowded(view: View, key: Key) -> str:
    """What is to be said where version ``key`` has a minimum and not all minimums find room, even on nodes that do
    nothing else and with all that a provider may still make; empty if they do, or nothing is known of nodes."""
    version, nodes = view.versions.get(key), list(_nodes(view))
    if version is None or not version.manifest.min_instances or not nodes:
        return ""
    needs = list(_needs(view))
    found = fitting(needs, nodes)
    if found >= len(needs):
        return ""
    return (
        f"min_instances: the nodes have room for {found} of the {len(needs)} instances that functions are to keep, "
        f"{version.manifest.min_instances} of {key[0]} among them; the others wait until there are more nodes"
    )


def _needs(view: View) -> Iterator[Need]:
    for name, function in view.functions.items():
        record = view.versions.get((name, function.active)) if function.active is not None else None
        if record is None or function.deleting or not record.manifest.min_instances:
            continue
        yield from [need_in(view, (name, record.version), record.manifest)] * record.manifest.min_instances


def _nodes(view: View) -> Iterator[Capacity]:
    for name, node in view.nodes.items():
        if node.status is not None and not (node.record.cordoned or node.status.draining):
            everything = free(view, node, [each for each in view.on(name).values() if not each.ended])
            cpu = everything.cpu if everything is not None else 0.0  # more than it has, where it promises more
            yield msgspec.structs.replace(total(node.status), cpu=max(cpu, node.status.cpu), each=node.status.cpu)
    pool = view.pool
    if pool is not None and pool.offer is not None and pool.shape is not None:
        yield from [empty(pool.shape)] * max(pool.offer.most - len(pool.arrived), 0)
