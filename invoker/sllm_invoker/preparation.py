"""All that a sandbox needs before its worker can begin, fetched at the same time: a start waits for the slowest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from sllm_invoker.bundles import BundleCache
from sllm_invoker.pool import WarmPool
from sllm_invoker.proofs import Proofs
from sllm_invoker.sandbox import Sandbox
from sllm_invoker.workdir import Workdirs
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.loader import CPU
from sllm_runtime.protocol.node import Progress, StartInstance
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.timeline import IMPORT, WEIGHTS
from sllm_runtime.protocol.worker import Assign

Report = Callable[[Progress], None]


class Weights(Protocol):
    """This node's loaderd, as a start needs it."""

    async def grant(
        self,
        model: ModelRecord,
        holder: str,
        report: Report,
        *,
        adapters: Sequence[ModelRecord] = (),
        devices: Sequence[str] = (CPU,),
    ) -> int:
        """A descriptor with rights to these for the sandbox ``holder``; loading has begun. The caller owns it."""

    async def devices(self, gpus: Sequence[int]) -> tuple[str, ...]:
        """What an instance with these GPUs may load to."""

    async def gone(self, holder: str) -> None:
        """Every process of ``holder`` is dead: what it held may be used again."""


@dataclass(frozen=True)
class Suppliers:
    """Where the parts come from."""

    pool: WarmPool
    bundles: BundleCache
    weights: Weights
    workdirs: Workdirs
    proofs: Proofs = field(default_factory=Proofs)


@dataclass(frozen=True)
class Prepared:
    """A sandbox and what it is given. ``fds`` are the bundle and, with a model, the loader session for ``devices``."""

    sandbox: Sandbox
    fds: tuple[int, ...]
    workdir: Path
    devices: tuple[str, ...] = (CPU,)


async def prepare(order: StartInstance, suppliers: Suppliers, stack: AsyncExitStack, report: Report) -> Prepared:
    """Everything for ``order``. What is acquired is freed by ``stack``, also when a part fails.

    Raises the first part's ``SllmError``.
    """
    # The stack unwinds backwards: the directory goes last, when nothing can write to it any more.
    workdir = suppliers.workdirs.make(order.instance)
    stack.push_async_callback(suppliers.workdirs.remove, workdir)
    tasks = (
        asyncio.ensure_future(_sandbox(order, suppliers, stack)),
        asyncio.ensure_future(_bundle(order, suppliers, stack)),
        asyncio.ensure_future(_weights(order, suppliers, stack, report)),
    )
    try:
        sandbox, bundle, (session, devices) = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return Prepared(sandbox, (bundle, *session), workdir, devices)


async def _sandbox(order: StartInstance, suppliers: Suppliers, stack: AsyncExitStack) -> Sandbox:
    sandbox = await suppliers.pool.acquire()
    if order.model is not None:  # runs after the sandbox is closed: only then may its chunks be used again
        stack.push_async_callback(suppliers.weights.gone, order.instance)
    stack.push_async_callback(sandbox.close)
    return sandbox


async def _bundle(order: StartInstance, suppliers: Suppliers, stack: AsyncExitStack) -> int:
    with _stage(IMPORT):
        fd = await suppliers.bundles.open(order.bundle, order.bundle_bytes)
    stack.callback(os.close, fd)
    return fd


async def _weights(
    order: StartInstance, suppliers: Suppliers, stack: AsyncExitStack, report: Report
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The loader session and the devices it may load to; no session without a model."""
    if order.model is None:
        return (), (CPU,)
    with _stage(WEIGHTS):
        devices = await suppliers.weights.devices(order.gpus)
        adapters = tuple(order.adapters.values())
        fd = await suppliers.weights.grant(order.model, order.instance, report, adapters=adapters, devices=devices)
    stack.callback(os.close, fd)
    return (fd,), devices


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """Errors name the stage that needed what is missing."""
    try:
        yield
    except SllmError as error:
        error.stage = error.stage or name
        raise


def assignment(order: StartInstance, prepared: Prepared, proofs: Proofs) -> Assign:
    """What the worker is told."""
    manifest = order.manifest
    return Assign(
        instance=order.instance,
        function=order.function,
        version=order.version,
        manifest=manifest,
        bundle=order.bundle,
        model=order.model.digest if order.model is not None else None,
        devices=prepared.devices,
        adapters={name: adapter.digest for name, adapter in order.adapters.items()},
        env={"TMPDIR": str(prepared.workdir), **manifest.env},
        memory_limit=manifest.memory + order.weights,
        threads=max(1, int(manifest.cpu)),
        gpus=order.gpus,
        proof=proofs.get(order),
        workdir=str(prepared.workdir),
        fds=len(prepared.fds),
    )
