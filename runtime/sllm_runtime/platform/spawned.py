"""Node processes that a controller of ``sllm up`` has started: they outlive that controller, and end with the platform.

Each is a ``sllm up --node`` with its data in ``<pool>/<name>``; ``<pool>/<name>.json`` says which process it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import time
from pathlib import Path

import msgspec
from pydantic import Field

from sllm_runtime.platform.nats_server import write_private
from sllm_runtime.platform.process import start_time
from sllm_runtime.platform.settings import Settings


class PoolSettings(Settings):
    """What ``sllm up`` must know of a pool of node processes: ``SLLM_NODE_PROVIDER``, ``SLLM_NODES_MOST``."""

    node_provider: str = "none"
    nodes_most: int = Field(default=2, ge=0, le=64)

    @property
    def most(self) -> int:
        return self.nodes_most if self.node_provider == "processes" else 0


class Spawned(msgspec.Struct, frozen=True, kw_only=True):
    """One of them. ``started`` tells its process from a later one with the same id; ``ending``: when it was asked to
    end, seconds of the monotonic clock, which all processes of a machine share."""

    node: str
    pid: int
    started: int
    ending: float | None = None

    def send(self, number: signal.Signals) -> None:
        """A signal, if it is still there."""
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(self.pid)
            try:
                if start_time(self.pid) == self.started:
                    signal.pidfd_send_signal(handle, number)
            finally:
                os.close(handle)


def record(pool: Path, spawned: Spawned) -> None:
    """Say which process it is."""
    write_private(pool / f"{spawned.node}.json", msgspec.json.encode(spawned).decode())


def spawned(pool: Path) -> dict[str, Spawned]:
    """Those that run, by name."""
    found = {}
    for path in sorted(pool.glob("*.json")):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            each = msgspec.json.decode(path.read_bytes(), type=Spawned)
            if start_time(each.pid) == each.started:
                found[each.node] = each
    return found


def end(pool: Path, each: Spawned) -> None:
    """Ask it to end. Raises ``OSError`` where it cannot be written that it was asked, which it was all the same."""
    try:
        record(pool, msgspec.structs.replace(each, ending=time.monotonic()))
    finally:
        each.send(signal.SIGTERM)


async def end_all(pool: Path, within_s: float) -> None:
    """End all of them, by SIGKILL after ``within_s`` seconds; the kernel ends their children with them."""
    for each in spawned(pool).values():
        with contextlib.suppress(OSError):  # a disk that is full
            end(pool, each)
    await asyncio.to_thread(_gone, [each.pid for each in spawned(pool).values()], within_s)
    for each in spawned(pool).values():
        each.send(signal.SIGKILL)


def _gone(pids: list[int], within_s: float) -> None:
    """Wait until these processes have ended."""
    deadline = time.monotonic() + within_s
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                poll = select.poll()
                poll.register(handle, select.POLLIN)
                poll.poll(max(deadline - time.monotonic(), 0.0) * 1000)
            finally:
                os.close(handle)
