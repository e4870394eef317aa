"""Supervision, one for one: a child that ends is started again with back-off, until it ends too often.

Children are started in stages (all of one stage side by side, each stage when the one before is ready) and stopped in
an order of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final

from sllm_runtime.platform.daemon import READY, READY_FD, READY_MOST
from sllm_runtime.platform.log_files import keep_short
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.process import Child, size, tail
from sllm_runtime.platform.restarts import Restarts
from sllm_runtime.protocol.errors import StartFailed, Unavailable

log = logging.getLogger(__name__)


class ChildState(StrEnum):
    """A supervised child."""

    WAITING = "WAITING"  # not started yet, or in its back-off
    STARTING = "STARTING"
    READY = "READY"
    STOPPING = "STOPPING"
    ENDED = "ENDED"


CHILD: Final[dict[ChildState, frozenset[ChildState]]] = {
    ChildState.WAITING: frozenset({ChildState.STARTING, ChildState.ENDED}),
    ChildState.STARTING: frozenset({ChildState.READY, ChildState.WAITING, ChildState.STOPPING, ChildState.ENDED}),
    ChildState.READY: frozenset({ChildState.WAITING, ChildState.STOPPING, ChildState.ENDED}),
    ChildState.STOPPING: frozenset({ChildState.ENDED}),
    ChildState.ENDED: frozenset(),
}


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """A program to be kept running."""

    name: str
    argv: Callable[[], Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict)
    stage: int = 0
    """Started when all of the stages below are ready."""
    stop_order: int = 0
    """Stopped when all with a higher number have ended."""
    log: Path | None = None
    cwd: Path | None = None
    ready: Callable[[Child], Awaitable[None]] | None = None
    """Waits until the child serves; none: it writes READY to the descriptor named in SLLM_READY_FD. Raises
    ``Unavailable`` if it never will."""
    ready_s: float = 30.0
    grace_s: float = 5.0


class _Kept:
    """One child through all its lives."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.state = ChildState.WAITING
        self.child: Child | None = None
        self.ends: deque[float] = deque(maxlen=1000)
        self.restarts = 0
        self.end = ""
        self.note = ""
        self.logged = 0
        """Bytes that its log had when this life of it began."""

    def move(self, new: ChildState) -> None:
        if new not in CHILD[self.state] and new != self.state:
            raise RuntimeError(f"{self.spec.name} cannot go from {self.state} to {new}")
        self.state = new


class Supervisor:
    """Keeps children running. ``start``, then ``failed`` says if one was given up; ``stop`` ends all.

    ``restarted`` hears of each that is ready again: its name, and how its life before ended.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        *,
        restarts: Restarts | None = None,
        changed: Callable[[], None] | None = None,
        restarted: Callable[[str, str], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kept = [_Kept(spec) for spec in specs]
        self._restarts = restarts or Restarts()
        self._changed = changed or (lambda: None)
        self._restarted = restarted or (lambda _name, _end: None)
        self._clock = clock
        self._tasks = Tasks("supervisor", self._fail)
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    def pids(self) -> dict[str, int]:
        """Process ids of what runs now, by name."""
        return {
            kept.spec.name: kept.child.pid
            for kept in self._kept
            if kept.child is not None
            and kept.child.process is not None
            and kept.state in (ChildState.STARTING, ChildState.READY, ChildState.STOPPING)
        }

    def notes(self) -> dict[str, str]:
        """What those that are ready want a person to know, by name."""
        return {kept.spec.name: kept.note for kept in self._kept if kept.note and kept.state is ChildState.READY}

    def restarts(self) -> dict[str, int]:
        """How often each child was started again."""
        return {kept.spec.name: kept.restarts for kept in self._kept}

    async def restart(self, name: str) -> None:
        """End ``name`` in order, if it is ready; its keeper starts it again."""
        for kept in self._kept:
            if kept.spec.name == name and kept.state is ChildState.READY and kept.child is not None:
                await kept.child.stop(kept.spec.grace_s)

    async def start(self) -> None:
        """Start all, stage by stage. Raises ``StartFailed`` with the end of its log for the first that fails."""
        self._tasks.start(keep_short({kept.spec.log for kept in self._kept if kept.spec.log is not None}), "logs")
        for stage in sorted({kept.spec.stage for kept in self._kept}):
            starting = [kept for kept in self._kept if kept.spec.stage == stage]
            first: list[asyncio.Future[None]] = []
            for kept in starting:
                begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._keepers[kept.spec.name] = self._tasks.start(self._keep(kept, begun), kept.spec.name)
                first.append(begun)
            await asyncio.wait(first, return_when=asyncio.FIRST_EXCEPTION)
            failures = [found for begun in first if begun.done() and (found := begun.exception())]
            if failures:
                raise failures[0]

    async def _keep(self, kept: _Kept, begun: asyncio.Future[None]) -> None:
        """One child's owner: start, wait, start again."""
        try:
            while True:
                try:
                    await self._live(kept, begun)
                finally:
                    if kept.child is not None and kept.state is not ChildState.ENDED:
                        await self._end(kept)
                await self._back_off(kept)
        except StartFailed as error:
            if begun.done():
                raise
            begun.set_exception(error)
        finally:
            if not begun.done():
                begun.cancel()
            kept.move(ChildState.ENDED)

    async def _live(self, kept: _Kept, begun: asyncio.Future[None]) -> None:
        """One life: returns when the child has ended. Raises ``StartFailed`` if the very first does not get ready."""
        spec = kept.spec
        kept.move(ChildState.STARTING)
        try:
            kept.child = await self._launch(kept)
        except StartFailed as error:
            if not begun.done():
                raise
            log.error("%s", error.message)
            return
        kept.move(ChildState.READY)
        if not begun.done():
            begun.set_result(None)
        self._changed()
        if kept.restarts:
            self._restarted(spec.name, kept.end)
        kept.end = describe(await kept.child.wait())
        log.error("%s (pid %d) ended with %s", spec.name, kept.child.pid, kept.end)

    async def _launch(self, kept: _Kept) -> Child:
        """A child that is ready. Raises ``StartFailed``."""
        spec = kept.spec
        kept.logged = size(spec.log)
        try:
            read, write = os.pipe()
        except OSError as error:
            raise StartFailed(f"{spec.name} cannot be started: {error}") from error
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, read)
            try:
                child = Child(
                    name=spec.name,
                    argv=spec.argv(),
                    env={**spec.env, READY_FD: str(write)},
                    output=spec.log,
                    pass_fds=(write,),
                    cwd=spec.cwd,
                )
                kept.child = child
                await child.start()
            except Unavailable as error:
                raise StartFailed(error.message) from error
            except OSError as error:  # its log cannot be opened
                raise StartFailed(f"{spec.name} cannot be started: {error}") from error
            finally:
                os.close(write)
            try:
                async with asyncio.timeout(spec.ready_s):
                    if spec.ready is None:
                        kept.note = await _wrote_ready(child, read)
                    else:
                        await spec.ready(child)
            except TimeoutError:
                raise StartFailed(f"{spec.name} was not ready after {spec.ready_s:g} s{_log_end(kept)}") from None
            except Unavailable as error:
                raise StartFailed(f"{spec.name}: {error.message}{_log_end(kept)}") from error
        return child

    async def _end(self, kept: _Kept) -> None:
        child = kept.child
        assert child is not None
        if child.process is not None and child.process.returncode is None:
            kept.move(ChildState.STOPPING if _cancelling() else kept.state)
            await asyncio.shield(child.stop(kept.spec.grace_s))
        else:
            child.kill_group()

    async def _back_off(self, kept: _Kept) -> None:
        kept.move(ChildState.WAITING)
        self._changed()
        now = self._clock()
        kept.ends.append(now)
        kept.restarts += 1
        recent = sum(1 for end in kept.ends if end > now - self._restarts.within_s)
        delay = self._restarts.delay(recent)
        if delay is None:
            raise StartFailed(
                f"{kept.spec.name} ended {recent} times within {self._restarts.within_s:g} s; giving up"
                + _log_end(kept)
            )
        await asyncio.sleep(delay)

    def _fail(self, error: BaseException) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    async def stop(self) -> None:
        """Stop all by ``stop_order``, highest first, each within its grace. Repeatable."""
        for order in sorted({kept.spec.stop_order for kept in self._kept}, reverse=True):
            names = [kept.spec.name for kept in self._kept if kept.spec.stop_order == order]
            ending = [self._keepers[name] for name in names if name in self._keepers]
            for task in ending:
                task.cancel()
            if ending:
                await asyncio.wait(ending)
        await self._tasks.close()
        if not self.failed.done():
            self.failed.cancel()


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _wrote_ready(child: Child, read: int) -> str:
    """Wait for READY from ``child``; what it says behind it. Raises ``Unavailable`` if it ends before."""
    loop = asyncio.get_running_loop()
    written = asyncio.Event()
    os.set_blocking(read, False)
    loop.add_reader(read, written.set)
    exited = asyncio.ensure_future(child.wait())
    waiting = asyncio.ensure_future(written.wait())
    try:
        await asyncio.wait([exited, waiting], return_when=asyncio.FIRST_COMPLETED)
        told = os.read(read, READY_MOST) if written.is_set() else b""
        if told.startswith(READY):
            return told.removeprefix(READY).decode(errors="replace")
        raise Unavailable(f"it ended with {describe(await exited)} before it was ready")
    finally:
        loop.remove_reader(read)
        exited.cancel()
        waiting.cancel()
        await asyncio.wait([exited, waiting])


def describe(status: int) -> str:
    """An exit status for people."""
    return f"signal {-status}" if status < 0 else f"status {status}"


def _log_end(kept: _Kept) -> str:
    end = tail(kept.spec.log, since=kept.logged)
    return f"; {kept.spec.log} ends:\n{end}" if end else ""
