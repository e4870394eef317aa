"""Nodes that are processes of this machine, for a platform of ``sllm up``: a group as a cloud has them, in small.

The nodes are real: each is ``sllm up --node``, an invoker with its loaderd. They outlive the controller that started
them, and end with the platform.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from sllm_runtime.control.providing.provider import Offer, Shape
from sllm_runtime.platform.local import Layout, drain_s, more_private, pool_names
from sllm_runtime.platform.process import PARENT, start_time
from sllm_runtime.platform.spawned import Spawned, end, record, spawned
from sllm_runtime.protocol.errors import Unavailable

KILL_S: Final = 30.0
"""What has not ended so long after it was asked to is killed."""
_OWN: Final = ("SLLM_CONTROLLER", "SLLM_IDENTITY_FILE", "SLLM_READY_FD", "SLLM_NODE_PROVIDER", PARENT)


class Processes:
    """A ``NodeProvider``. ``pool``: the directory of their data, in that of the platform. Nothing starts one again that
    has ended: it is one fewer."""

    def __init__(self, pool: Path, shape: Shape, least: int, most: int, environment: Mapping[str, str]) -> None:
        self._pool, self._shape, self._least, self._most = pool, shape, least, most
        self._environment = environment
        self._children: list[subprocess.Popen[bytes]] = []

    async def capacity(self) -> Offer:
        """As ``NodeProvider``."""
        self._children = [child for child in self._children if child.poll() is None]
        there = spawned(self._pool)
        for each in there.values():
            if each.ending is not None and time.monotonic() - each.ending > KILL_S:
                each.send(signal.SIGKILL)
        members = frozenset(name for name, each in there.items() if each.ending is None)
        return Offer(len(members), self._least, self._most, members, self._shape)

    async def set_desired(self, nodes: int) -> None:
        """As ``NodeProvider``."""
        there = await self.capacity()
        for name in self._names()[: min(nodes, self._most) - there.desired]:
            await asyncio.to_thread(self._start, name)

    async def remove(self, node: str) -> None:
        """As ``NodeProvider``."""
        each = spawned(self._pool).get(node)
        if each is not None and each.ending is None:
            end(self._pool, each)

    def _names(self) -> list[str]:
        """Names that are free, those first that were used longest ago: a node that went may still be remembered."""
        taken = spawned(self._pool).keys()
        free = [name for name in pool_names(self._most) if name not in taken]
        return sorted(free, key=lambda name: _used(self._pool / f"{name}.json"))

    def _start(self, name: str) -> None:
        """Begin one; it is ready when it reports."""
        self._pool.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv = [sys.executable, "-m", "sllm_runtime.platform", "up", "--node", "--data", str(self._pool / name)]
        try:
            with (self._pool / f"{name}.log").open("ab") as log:
                child = subprocess.Popen(
                    argv,
                    env=self._environment_of(name),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            raise Unavailable(f"node {name} cannot be started: {error}") from error
        self._children.append(child)
        started = start_time(child.pid)
        if started is not None:
            try:
                record(self._pool, Spawned(node=name, pid=child.pid, started=started))
            except OSError as error:  # nobody would know of it
                child.kill()
                child.wait()
                raise Unavailable(f"node {name} cannot be started: {error}") from error

    def _environment_of(self, name: str) -> dict[str, str]:
        given, shape, platform = self._environment, self._shape, Layout(self._pool.parent)
        kept = {key: value for key, value in given.items() if key not in _OWN and not key.startswith("SLLM_NODES_")}
        weights = shape.memory // 2
        others = (platform.data / each for each in ("nodes", "logs"))
        private = (platform.nats, platform.token, platform.secrets, self._pool, *others)
        owner = int(given.get(PARENT) or os.getpid())
        return kept | {
            "SLLM_NODE": name,
            "SLLM_NODE_DRAIN": str(drain_s(given)),
            "SLLM_NODE_OWNER": f"{owner}:{start_time(owner)}",
            "SLLM_IDENTITY_FILE": str(platform.identity_file(name)),
            "SLLM_CPU": str(shape.cpu),
            "SLLM_CPU_OVERCOMMIT": "1",
            "SLLM_MEMORY": str(shape.memory + weights),
            "SLLM_POOL_BYTES": str(weights),
            "SLLM_GPUS": ",".join(f"{gpu.kind}:{gpu.memory}" for gpu in shape.gpus),
            "SLLM_LABELS": ",".join(f"{key}={value}" for key, value in shape.labels.items()),
            "SLLM_PRIVATE": json.dumps([*map(str, private), *more_private(given)]),
        }


def _used(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
