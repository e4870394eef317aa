"""The sandboxes that may hold chunks: their connections, and when they are dead."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from sllm_loaderd.daemon.keeper import DeviceHandout, Handout, Keeper
from sllm_loaderd.daemon.sandbox import Rights, SandboxConnection
from sllm_loaderd.daemon.service import LoaderService
from sllm_loaderd.daemon.usage import used_inodes
from sllm_runtime.platform.wire import AsyncWire

log = logging.getLogger(__name__)
_PROOF_EVERY_S = 1.0
_PROOF_TRIES = 60
_PROOF_SELDOM_S = 30.0
"""After so many tries: to read /proc takes its time, and who lives on that long may do so for days."""
_CLEAN_LOOKS = 2
"""A process may fork while /proc is being read: one clean look is no proof."""


@dataclass(eq=False)
class _Holder:
    owner: object | None
    """The control connection whose client answers for it; None once that is gone."""
    connections: list[SandboxConnection] = field(default_factory=list)
    pidfd: int | None = None
    proof: asyncio.Task[None] | None = None


class Holders:
    """Owns the sandbox connections and their tasks (in ``group``)."""

    def __init__(self, service: LoaderService, group: asyncio.TaskGroup) -> None:
        self._service = service
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._holders: dict[str, _Holder] = {}
        self._keepers: dict[object, Keeper] = {}
        service.pool.on_freed = service.stage.on_freed = service.counted.on_freed = self._freed

    def keeps(self, owner: object, keeper: Keeper) -> None:
        """The client ``owner`` keeps duplicates of what its sandboxes are given."""
        self._keepers[owner] = keeper

    def declare(self, owner: object, names: Sequence[str]) -> None:
        """Sandboxes that live, by the word of ``owner``, which will say when they are gone."""
        for name in names:
            self._holders.setdefault(name, _Holder(owner)).owner = owner

    def grant(self, owner: object, rights: Rights, pidfd: int | None) -> int:
        """A new connection for a sandbox; returns the sandbox's end, which the caller owns.

        ``owner`` will say when the sandbox is gone. ``pidfd`` (duplicated here): it is gone when its process is.
        """
        name = rights.holder
        self.declare(owner, [name])
        holder = self._holders[name]
        if pidfd is not None and holder.pidfd is None:
            holder.pidfd = os.dup(pidfd)
            self._loop.add_reader(holder.pidfd, self.gone, name)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        connection = SandboxConnection(AsyncWire(ours, max_fds=0), rights, self._service, self._keep)
        holder.connections.append(connection)
        task = self._group.create_task(connection.serve(), name=f"sandbox {name}")
        task.add_done_callback(lambda _: self._disconnected(name, holder, connection))
        return theirs.detach()

    def gone(self, name: str) -> None:
        """Every process of the sandbox ``name`` is dead: what it held can be used again. Repeatable."""
        holder = self._holders.pop(name, None)
        if holder is not None:
            self._end(holder)
        self._service.forget(name)

    def owner_lost(self, owner: object) -> None:
        """The client that answered for its sandboxes is gone: they are freed when they are proven dead."""
        self._keepers.pop(owner, None)
        for name, holder in self._holders.items():
            if holder.owner is owner:
                holder.owner = None
                self._orphan(name, holder)

    def _keep(self, handout: Handout | DeviceHandout) -> None:
        holder = self._holders.get(handout.holder)
        keeper = self._keepers.get(holder.owner) if holder is not None else None
        if keeper is None:
            return
        if isinstance(handout, DeviceHandout):
            keeper.keep_device(handout)
        else:
            keeper.keep(handout)

    def _freed(self, ids: Sequence[int]) -> None:
        if ids:
            for keeper in self._keepers.values():
                keeper.freed(ids)

    def _disconnected(self, name: str, holder: _Holder, connection: SandboxConnection) -> None:
        holder.connections.remove(connection)
        self._orphan(name, holder)

    def _orphan(self, name: str, holder: _Holder) -> None:
        """Begin to look for the proof, if nobody else will say that ``name`` is dead."""
        orphan = holder.owner is None and holder.pidfd is None and not holder.connections
        if orphan and holder.proof is None and self._holders.get(name) is holder:
            holder.proof = self._group.create_task(self._prove(name, holder), name=f"orphan {name}")

    async def _prove(self, name: str, holder: _Holder) -> None:
        """A closed connection proves nothing, the sandbox may keep its mappings; that no process has them does."""
        clean = 0
        for number in itertools.count(1):
            try:
                used = await asyncio.to_thread(used_inodes)
            except (OSError, RuntimeError) as error:  # short of descriptors, or threads: nothing is proven
                log.warning("nobody can see now who has memory of %s: %s", name, error)
                used = None
            if self._holders.get(name) is not holder or holder.owner is not None or holder.connections:
                holder.proof = None
                return
            clean = clean + 1 if used is not None and not used & self._service.pool.inodes_of(name) else 0
            if clean == _CLEAN_LOOKS:
                holder.proof = None
                log.info("sandbox %s was left by its invoker and is dead", name)
                self.gone(name)
                return
            if number == _PROOF_TRIES:
                log.warning("sandbox %s was left by its invoker and lives on: its chunks stay held until it ends", name)
            if not clean:
                await asyncio.sleep(_PROOF_EVERY_S if number < _PROOF_TRIES else _PROOF_SELDOM_S)

    def close(self) -> None:
        """End all connections; their tasks end in the group."""
        for holder in self._holders.values():
            self._end(holder)
        self._holders.clear()

    def _end(self, holder: _Holder) -> None:
        if holder.proof is not None:
            holder.proof.cancel()
        if holder.pidfd is not None:
            self._loop.remove_reader(holder.pidfd)
            os.close(holder.pidfd)
        for connection in list(holder.connections):
            connection.close()
