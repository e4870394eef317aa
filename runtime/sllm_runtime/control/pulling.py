"""Models brought to the disks of nodes before anything starts there: by hand, or by their placement."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from sllm_runtime.control import registry
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.models import AGAIN_S, AWAY, TRIES
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.view import View
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.protocol.ctl import Pulled
from sllm_runtime.protocol.errors import (
    Conflict,
    DeadlineExceeded,
    ErrorBody,
    NodeNotFound,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.protocol.records import ModelRecord

STALLED_S: Final = 120.0
"""A pull of which no more comes for so long is given up; its node may go on with it, and who asks again joins that."""
KEPT_S: Final = 15.0
"""A failure is kept for so long, until somebody has been told: who polls may just have had his answer."""
BUSY_TRIES: Final = 240
"""Times that a copy which is being written beside a load is asked for again."""


class Pull:
    """One model on its way to one node; whoever wants it there joins."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.progress = Progress(stage="pull")
        self.done = asyncio.Event()
        self.error: ErrorBody | None = None
        self.ended = 0.0

    def result(self) -> None:
        """Raises what the node raised, with its name. Valid when ``done``."""
        if self.error is not None:
            raise msgspec.structs.replace(self.error, message=f"{self.node}: {self.error.message}").to_error()


class Pulls:
    """Owns the pulls that go on: ``close`` ends them (the nodes go on with what they have begun)."""

    def __init__(
        self, loop: Loop, nodes: Nodes, clock: Callable[[], float] = time.monotonic, stalled_s: float = STALLED_S
    ) -> None:
        self._loop, self._nodes = loop, nodes
        self._clock, self._stalled_s = clock, stalled_s
        self._running: dict[tuple[str, str], Pull] = {}
        self._tasks = Tasks("pulls")

    async def close(self) -> None:
        await self._tasks.close()

    def join(self, model: ModelRecord, node: str) -> Pull:
        """The running pull of ``model`` to ``node``, one that has just failed and nobody knows of, or a new one."""
        old = self._clock() - KEPT_S
        self._running = {k: each for k, each in self._running.items() if not each.done.is_set() or each.ended > old}
        key = (model.digest, node)
        pull = self._running.get(key)
        if pull is None:
            pull = self._running[key] = Pull(node)
            self._tasks.start(self._run(model, pull), f"pull {model.digest} to {node}")
        return pull

    def told(self, model: str, pull: Pull) -> None:
        """Somebody knows how it ended: who asks next begins anew."""
        if pull.done.is_set() and self._running.get((model, pull.node)) is pull:
            del self._running[model, pull.node]

    async def pull(self, digest: str, nodes: tuple[str, ...], wait_s: float) -> Pulled:
        """Long poll: the model when all of it is on the disk of each of ``nodes`` (none named: of all that are up),
        else how far it is. Raises ``ModelNotFound``, ``NodeNotFound``, and what a node raised."""
        model = registry.model_of(self._loop.view, digest)
        pulls = [self.join(model, node) for node in targets(self._loop.view, nodes, time.monotonic())]
        try:
            async with asyncio.timeout(wait_s):
                for pull in pulls:
                    await pull.done.wait()
                    self._result(model, pull)
        except TimeoutError:
            for pull in pulls:
                if pull.done.is_set():
                    self._result(model, pull)
            return Pulled(progress=_all(pulls, model))
        return Pulled(model=registry.model_info(self._loop.view, model), nodes=tuple(pull.node for pull in pulls))

    def _result(self, model: ModelRecord, pull: Pull) -> None:
        self.told(model.digest, pull)
        pull.result()

    async def _run(self, model: ModelRecord, pull: Pull) -> None:
        try:
            await self._ask(model, pull)
        except SllmError as error:
            pull.error = error.body()
        finally:
            pull.ended = self._clock()
            pull.done.set()
            if pull.error is None:
                self.told(model.digest, pull)

    async def _ask(self, model: ModelRecord, pull: Pull) -> None:
        silent = busy = 0
        moved = self._clock()
        while True:
            try:
                reply = await self._nodes.pull(pull.node, model)
            except (Unavailable, DeadlineExceeded) as error:
                silent += 1
                if silent >= TRIES or type(error) not in AWAY:
                    raise
            except Conflict as error:
                busy += 1
                if busy >= BUSY_TRIES or not _passes(error):
                    raise
            else:
                if reply.model is not None:
                    return
                silent = busy = 0
                if reply.progress is not None and reply.progress != pull.progress:
                    pull.progress, moved = reply.progress, self._clock()
                self._stalled(model, pull, moved)
                continue
            await asyncio.sleep(AGAIN_S)

    def _stalled(self, model: ModelRecord, pull: Pull, moved: float) -> None:
        """Raises ``DeadlineExceeded`` if no more has come for too long."""
        if self._clock() - moved < self._stalled_s:
            return
        there = f"{show_bytes(pull.progress.done)} of {show_bytes(model.nbytes)}"
        raise DeadlineExceeded(
            f"no more of model {model.digest} has come for {self._stalled_s:g} s ({pull.progress.stage}, {there}); "
            "look at the log of its loaderd, and ask again"
        )


def targets(view: View, nodes: Iterable[str], now: float) -> tuple[str, ...]:
    """The nodes that are meant. Raises ``NodeNotFound`` for one that is not up, or if none is."""
    up = sorted(name for name in view.nodes if view.alive(name, now))
    wanted = tuple(dict.fromkeys(nodes)) or tuple(up)
    missing = sorted(set(wanted) - set(up))
    if missing or not wanted:
        raise NodeNotFound(f"node {', '.join(missing) or '(any)'} is not up; `sllm node list` shows those that are")
    return wanted


def _all(pulls: list[Pull], model: ModelRecord) -> Progress:
    """Of all of them together; the stage of the first that goes on."""
    on = next((pull for pull in pulls if not pull.done.is_set()), pulls[0])
    done = sum(model.nbytes if pull.done.is_set() else pull.progress.done for pull in pulls)
    left = ", ".join(pull.node for pull in pulls if not pull.done.is_set())
    return Progress(
        stage=on.progress.stage, done=done, total=len(pulls) * model.nbytes, message=f"{on.progress.stage} to {left}"
    )


def _passes(error: Conflict) -> bool:
    """A copy that is being written is there in a while; a source that has changed stays so."""
    # Nodes of the release before say so in words alone.
    return error.retry_after_s is not None or error.message.endswith(("; ask again", "; wait for it"))
