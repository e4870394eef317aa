"""The servers of a view, ordered as starts look at them. What did not change since the last view is not made again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

from sllm_runtime.control.fits import Need, need_in
from sllm_runtime.control.scheduling.servers import Server, server
from sllm_runtime.control.traced import changed
from sllm_runtime.control.view import EMPTY, Instance, Key, Move, Node, View
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.records import ModelRecord

Order: TypeAlias = tuple[float, int, str]
"""Seconds of waiting, less free memory first, then by name."""
MOST_NEEDS: Final = 100_000
"""Versions whose needs are kept."""
MOST_ORDERS: Final = 256
"""Orders, by path and kind of accelerator, that are kept; beyond, all are forgotten and made again as they are asked
for."""


class Servers:
    """The index. ``of(view)`` brings it up to date; all else speaks of that view. Not for use by two threads."""

    def __init__(self) -> None:
        self._last: tuple[Mapping[str, Node], Mapping[str, Mapping[str, Instance]], Mapping[str, Move]]
        self._last = (EMPTY, EMPTY, EMPTY)
        self._all: dict[str, Server] = {}
        self._names: list[str] | None = None
        self._dram: dict[str, dict[str, None]] = {}
        self._ssd: dict[str, dict[str, None]] = {}
        self._yielding: dict[str, Server] = {}
        self._busy: dict[str, Server] = {}
        self._orders: dict[tuple[str, str], _Order] = {}
        self._needs: dict[Key, tuple[Manifest, Need]] = {}
        self._models: Mapping[str, ModelRecord] = EMPTY
        """What the needs were made of."""

    def of(self, view: View) -> Mapping[str, Server]:
        """Every node of ``view`` that has reported, by name."""
        nodes, there, moves = view.nodes, view.instances.nodes, view.moves
        old_nodes, old_there, old_moves = self._last
        if nodes is old_nodes and there is old_there and moves is old_moves:
            return self._all
        to = {move.node for each in (old_moves, moves) for move in each.values()} if moves is not old_moves else ()
        for name in {*changed(old_nodes, nodes), *changed(old_there, there), *to}:
            before, node = self._all.get(name), nodes.get(name)
            if node is not None and node.status is not None:
                self._put(before, server(view, node, node.status, before))
            elif before is not None:
                self._drop(before)
        self._last = (nodes, there, moves)
        return self._all

    def need(self, view: View, key: Key, manifest: Manifest) -> Need:
        """What an instance of version ``key`` needs, its models included."""
        if view.models is not self._models:
            self._models = view.models
            self._needs.clear()
        known = self._needs.get(key)
        if known is not None and known[0] is manifest:
            return known[1]
        if len(self._needs) >= MOST_NEEDS:
            self._needs.clear()
        need = need_in(view, key, manifest)
        self._needs[key] = (manifest, need)
        return need

    # --- orders -------------------------------------------------------------------------------------
    def __len__(self) -> int:
        return len(self._all)

    def by_name(self) -> list[Server]:
        """Every server; the list is the caller's."""
        if self._names is None:
            self._names = sorted(self._all)
        return [self._all[name] for name in self._names]

    def by_memory(self, kind: str = "") -> Iterator[Server]:
        """Every server that has an accelerator of ``kind`` free (empty: every one), most free memory first."""
        waits, _ = self.by_wait("", kind)
        return (server for _, server in waits)

    def in_dram(self, digest: str) -> list[Server]:
        """Those with all of the model in memory, in no order."""
        return [self._all[name] for name in self._dram.get(digest, ())]

    def on_ssd(self, digest: str) -> list[Server]:
        """Those with the model on their SSD, in no order."""
        return [self._all[name] for name in self._ssd.get(digest, ())]

    def by_wait(self, path: str, kind: str = "") -> tuple[Iterator[tuple[float, Server]], float]:
        """All servers that have an accelerator of ``kind`` free (empty: all) with the seconds that a load by ``path``
        waits there, shortest first; and bytes per second, of which none has more."""
        found = self._orders.get((path, kind))
        if found is None:
            if len(self._orders) >= MOST_ORDERS:
                self._orders.clear()
            found = self._orders[path, kind] = _Order(path, kind)
            for server in self._all.values():
                found.put(server)
        return ((order[0], self._all[order[2]]) for order in found.order), found.fastest

    @property
    def yielding(self) -> Mapping[str, Server]:
        """Those with instances that are idle or on their way out."""
        return self._yielding

    @property
    def busy(self) -> Mapping[str, Server]:
        """Those with instances whose running calls could go on elsewhere."""
        return self._busy

    # --- keeping them -------------------------------------------------------------------------------
    def _put(self, before: Server | None, after: Server) -> None:
        if before is None or before.stored is not after.stored:
            self._forget_models(before)
            for table, digests in ((self._dram, after.stored.dram), (self._ssd, after.stored.ssd)):
                for digest in digests:
                    table.setdefault(digest, {})[after.name] = None
        if before is None:
            self._names = None
        self._all[after.name] = after
        _mark(self._yielding, after, bool(after.yielding))
        _mark(self._busy, after, bool(after.working))
        for order in self._orders.values():
            order.put(after)

    def _drop(self, gone: Server) -> None:
        self._forget_models(gone)
        self._names = None
        for marked in (self._all, self._yielding, self._busy):
            marked.pop(gone.name, None)
        for order in self._orders.values():
            order.drop(gone.name)

    def _forget_models(self, server: Server | None) -> None:
        if server is None:
            return
        for table, digests in ((self._dram, server.stored.dram), (self._ssd, server.stored.ssd)):
            for digest in digests:
                holders = table[digest]
                del holders[server.name]
                if not holders:
                    del table[digest]


class _Order:
    """Servers with a free accelerator of a kind (lower case; empty: all servers) by how long a load waits on a path."""

    def __init__(self, path: str, kind: str) -> None:
        self.order: list[Order] = []
        self._places: dict[str, Order] = {}
        self.fastest = 0.0
        """At least the bandwidth of each; not lowered when one becomes slower, which only makes searches longer."""
        self._path, self._kind = path, kind

    def put(self, server: Server) -> None:
        """In place of what it was."""
        new, old = self._of(server), self._places.get(server.name)
        if old == new:
            return
        self.drop(server.name)
        if new is not None:
            insort(self.order, new)
            self._places[server.name] = new

    def drop(self, name: str) -> None:
        old = self._places.pop(name, None)
        if old is not None:
            del self.order[bisect_left(self.order, old)]

    def _of(self, server: Server) -> Order | None:
        if self._kind and self._kind not in server.spare:
            return None
        wait, bandwidth = server.wait(self._path)
        self.fastest = max(self.fastest, bandwidth)
        return (wait, -server.free.memory, server.name)


def _mark(table: dict[str, Server], server: Server, marked: bool) -> None:
    if marked:
        table[server.name] = server
    else:
        table.pop(server.name, None)
