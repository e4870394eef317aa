"""Models by content: registered by one node's preparation, joined by URI, checked and deleted on the nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

import msgspec

from sllm_runtime.control import registry
from sllm_runtime.control.changes import NODES
from sllm_runtime.control.fits import need_of, short, total
from sllm_runtime.control.ledger import Ledger
from sllm_runtime.control.loop import Loop
from sllm_runtime.control.nodes import Nodes
from sllm_runtime.control.providing.awaiting import awaited, need_of_errand
from sllm_runtime.control.providing.pool import Errand
from sllm_runtime.control.providing.sizing import sent
from sllm_runtime.control.view import View
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.requests import Unserved
from sllm_runtime.protocol.ctl import ModelInfo, Registered
from sllm_runtime.protocol.errors import (
    DeadlineExceeded,
    DigestMismatch,
    ErrorBody,
    InvalidCheckpoint,
    ModelNotFound,
    NoCapacity,
    NodeNotFound,
    SllmError,
    Unavailable,
)
from sllm_runtime.protocol.limits import HEARTBEAT_S
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.node import NodeStatus, Progress
from sllm_runtime.protocol.records import ModelRecord

log = logging.getLogger(__name__)

NODES_WAIT_S: Final = 10.0
AGAIN_S: Final = 0.5
TRIES: Final = 6
"""Questions in a row that a node may leave unanswered before the preparation fails."""
AWAY: Final = frozenset({Unavailable, Unserved, DeadlineExceeded})
"""How a question ends whose node is away for a moment, or restarts. Others of their kinds (a full pool) are answers."""
DIGEST: Final = "sha256:"


class Preparation:
    """One model being made ready on one node; whoever wants it joins."""

    def __init__(self) -> None:
        self.progress = Progress(stage="model")
        self.node = ""
        """That was asked last. Another one would fetch and convert all of it again."""
        self.done = asyncio.Event()
        self.model: ModelRecord | None = None
        self.error: ErrorBody | None = None

    def result(self) -> ModelRecord:
        """Raises what the node raised. Valid when ``done``."""
        if self.error is not None:
            raise self.error.to_error()
        if self.model is None:
            raise Unavailable("the preparation of the model was broken off; try again")
        return self.model


class Models:
    """Registers, checks and deletes models. Owns its preparations: ``close`` ends them."""

    def __init__(self, loop: Loop, ledger: Ledger, nodes: Nodes) -> None:
        self._loop, self._ledger, self._nodes = loop, ledger, nodes
        self._running: dict[str, Preparation] = {}
        self._tasks = Tasks("models")

    async def close(self) -> None:
        await self._tasks.close()

    # --- registering --------------------------------------------------------------------------------
    def join(self, uri: str, manifest: Manifest | None = None) -> Preparation:
        """The running preparation of ``uri``, or a new one on a node that ``manifest`` fits."""
        preparation = self._running.get(uri)
        if preparation is None:
            preparation = self._running[uri] = Preparation()
            self._tasks.start(self._run(uri, manifest, preparation), f"prepare {uri}")
        return preparation

    async def register(self, uri: str, wait_s: float) -> Registered:
        """Long poll: the model when it is there, else how far it is. Raises what the node raised."""
        preparation = self.join(uri)
        try:
            async with asyncio.timeout(wait_s):
                await preparation.done.wait()
        except TimeoutError:
            return Registered(progress=preparation.progress)
        return Registered(model=preparation.result())

    async def _run(self, uri: str, manifest: Manifest | None, preparation: Preparation) -> None:
        try:
            await self._ledger.require_room()
            model = await self._prepare(uri, manifest, preparation)
            model = msgspec.structs.replace(model, created=model.created or time.time())
            await self._loop.commit(lambda view: registry.know(view, model))
            preparation.model = model
        except SllmError as error:
            preparation.error = error.body()
        finally:
            self._loop.change(lambda view: sent(view, uri, None))
            self._running.pop(uri, None)
            preparation.done.set()

    async def _prepare(self, uri: str, manifest: Manifest | None, preparation: Preparation) -> ModelRecord:
        silent = 0
        while True:
            node = await self._choose(uri, manifest, preparation)
            try:
                reply = await self._nodes.prepare(node, uri)
            except (Unavailable, DeadlineExceeded) as error:
                silent += 1
                if silent >= TRIES or type(error) not in AWAY:
                    raise
                await asyncio.sleep(AGAIN_S)
                continue
            if reply.model is not None:
                return reply.model
            silent = 0
            preparation.progress = reply.progress or preparation.progress

    async def _choose(self, uri: str, manifest: Manifest | None, preparation: Preparation) -> str:
        """A living node, of those the manifest fits if there are any; one that the provider makes is waited for. Raises
        ``NoCapacity``."""
        if _takes(self._loop.view, preparation.node, time.monotonic()) is not None:
            return preparation.node
        errand, wait_s = errand_of(manifest), NODES_WAIT_S
        node, pool = best_node(self._loop.view, manifest, time.monotonic()), self._loop.view.pool
        if node is None and pool is not None:
            progress = awaited(self._loop.view, need_of_errand(errand), time.monotonic())
            wait_s = pool.timing.lost if progress is not None else wait_s
            preparation.progress = progress or preparation.progress
            self._loop.change(lambda view: sent(view, uri, errand))
        if node is None:
            node = await self._loop.until(NODES, lambda view: best_node(view, manifest, time.monotonic()), wait_s)
        if node is None:
            raise NoCapacity("no node is up to prepare the model; see `sllm node list`", stage="model")
        preparation.node, there = node, replace(errand, node=node)
        self._loop.change(lambda view: sent(view, uri, there))
        return node

    # --- checking, deleting -------------------------------------------------------------------------
    async def validate(self, digest: str) -> ModelInfo:
        """Check every byte on each living node that has it; ``problem`` says what was found, and where. Where nothing
        was it raises what kept a node from it: ``DeadlineExceeded`` while it goes on, which who asks again joins."""
        record = registry.model_of(self._loop.view, digest)
        nodes = self._holders(record.digest) | self._living(lambda status: status.untold > 0)
        errors = [e for e in await self._on(nodes, "validate", record.digest) if not isinstance(e, ModelNotFound)]
        if not errors:
            raise NodeNotFound(f"no living node has model {record.digest[:19]}; call or deploy a function that uses it")
        wrong = [error.message for error in errors if isinstance(error, InvalidCheckpoint | DigestMismatch)]
        others = [error for error in errors if error is not None]
        if others and not wrong:
            raise others[0]
        return registry.model_info(self._loop.view, record, "; ".join(wrong))

    async def delete(self, digest: str, *, again: bool = False) -> ModelInfo:
        """Forget it, and remove it from the nodes that are up, also where it is only coming: no report says that; where
        it is left ``problem`` says. ``again``: it was asked before, and may be forgotten already, as it may be while a
        node has it. Raises ``Conflict`` while a version needs it."""
        record = registry.left_of(self._loop.view, digest)
        if not (again or self._lies(record.digest)):
            registry.model_of(self._loop.view, digest)
        info = registry.model_info(self._loop.view, record)
        await self._loop.commit(lambda view: registry.drop_model(view, record.digest))
        nodes = self._holders(record.digest) | self._living(lambda status: status.storage is not None)
        # Of one that is nowhere any more a beginning may be all that is known.
        whole = len(record.digest) == len(DIGEST) + 64
        errors = await self._on(nodes if whole else (), "delete", record.digest)
        left = [e.message for e in errors if e is not None and not isinstance(e, ModelNotFound)]
        away = sorted(self._lies(record.digest) - self._living(lambda _: True))
        left += [f"{node}: it is not heard, and has it still" for node in away]
        silent = sorted(name for name, node in self._loop.view.nodes.items() if node.status is None) if whole else ()
        left += [f"{node}: it was not heard yet, and may have it still" for node in silent]
        return msgspec.structs.replace(info, problem=f"not removed everywhere: {'; '.join(left)}" if left else "")

    async def _on(self, nodes: Iterable[str], verb: str, digest: str) -> list[SllmError | None]:
        """What each of ``nodes`` raises, which the message names."""
        return await asyncio.gather(*(self._on_one(node, verb, digest) for node in sorted(nodes)))

    async def _on_one(self, node: str, verb: str, digest: str) -> SllmError | None:
        try:
            await self._nodes.model(node, verb, digest)
        except SllmError as error:
            return msgspec.structs.replace(error.body(), message=f"{node}: {error.message}").to_error()
        return None

    def _lies(self, digest: str) -> set[str]:
        """Nodes whose last report says that they have it, whether they live or not."""
        return set(registry.holders(self._loop.view, frozenset({digest})).get(digest, ()))

    def _holders(self, digest: str) -> set[str]:
        """Living nodes that report to have it."""
        return self._lies(digest) & self._living(lambda _: True)

    def _living(self, which: Callable[[NodeStatus], bool]) -> set[str]:
        view, now = self._loop.view, time.monotonic()
        said = {name: node.status for name, node in view.nodes.items() if view.alive(name, now)}
        return {name for name, status in said.items() if status is not None and which(status)}


def best_node(view: View, manifest: Manifest | None, now: float) -> str | None:
    """The node to prepare a model on: alive, accepting work, the manifest fits it best, most idle. None: none is."""
    need = need_of(manifest) if manifest is not None else None
    found = []
    for name in view.nodes:
        status = _takes(view, name, now)
        if status is None:
            continue
        lacks = len(short(need, total(status))) if need is not None else 0
        found.append((lacks, -status.free_cpu, name))
    return min(found)[2] if found else None


def _takes(view: View, name: str, now: float) -> NodeStatus | None:
    """What node ``name`` reports, if it lives and accepts work."""
    node = view.nodes.get(name)
    if node is None or node.status is None or node.status.draining or node.record.cordoned:
        return None
    return node.status if view.alive(name, now) else None


def errand_of(manifest: Manifest | None) -> Errand:
    """A preparation as the provider of nodes is told of it, waiting for one."""
    if manifest is None:
        return Errand("")
    need = need_of(manifest)
    return Errand("", need.cpu, need.memory, need.gpus, need.gpu_memory)


def nodes_known(view: View, now: float) -> bool | None:
    """True when every node of the registry has reported, or had the time to; None: wait."""
    if view.pool is not None and view.pool.offer is not None and not view.nodes:
        return True  # there is none, and one can be had
    heard = [node for node in view.nodes.values() if node.status is not None]
    patient = now - view.listening_since < 2 * HEARTBEAT_S
    return None if not heard or (patient and len(heard) < len(view.nodes)) else True
