"""All that a sandbox needs before its worker can begin, fetched at the same time: a start waits for the slowest."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Protocol

from sllm_invoker.bundles import BundleCache
from sllm_invoker.pools import WarmPools
from sllm_invoker.proofs import Proofs
from sllm_invoker.sandbox import Sandbox, Wish
from sllm_invoker.start_times import StartTimes
from sllm_invoker.wiring import clustered, members
from sllm_invoker.workdir import Workdirs
from sllm_runtime.platform import trace
from sllm_runtime.protocol.errors import ImageFailed, InvalidCheckpoint, PythonMismatch, SllmError
from sllm_runtime.protocol.loader import CPU
from sllm_runtime.protocol.node import Progress, StartInstance
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.timeline import IMPORT, SANDBOX, WEIGHTS, Span
from sllm_runtime.protocol.worker import Assign, Member

Report = Callable[[Progress], None]


class Weights(Protocol):
    """This node's loaderd, as a start needs it."""

    async def grant(
        self,
        model: ModelRecord,
        holder: str,
        report: Report,
        *,
        partitions: Sequence[int] | None = None,
        adapters: Sequence[ModelRecord] = (),
        devices: Sequence[str] = (CPU,),
    ) -> int:
        """A descriptor with rights to these (of ``model`` to ``partitions``; ``None``: all) for the sandbox ``holder``;
        loading has begun. The caller owns it."""

    async def devices(self, gpus: Sequence[int]) -> tuple[str, ...]:
        """What an instance with these GPUs may load to."""

    async def gone(self, holder: str) -> None:
        """Every process of ``holder`` is dead: what it held may be used again."""


class Images(Protocol):
    """Images of this node's containers."""

    async def ensure(self, image: str | None, requirements: Sequence[str], report: Callable[[str], None]) -> str:
        """The name of what a manifest asks for; made first where it is not there."""


@dataclass(frozen=True)
class Suppliers:
    """Where the parts come from."""

    pool: WarmPools
    bundles: BundleCache
    weights: Weights
    workdirs: Workdirs
    proofs: Proofs = field(default_factory=Proofs)
    images: Images | None = None
    """None: sandboxes are processes, which run from no image."""


@dataclass(frozen=True)
class Seat:
    """A sandbox that becomes ``member``. ``fds`` are the bundle and, with a model, the loader session."""

    member: Member
    sandbox: Sandbox
    fds: tuple[int, ...]


@dataclass(frozen=True)
class Prepared:
    """The sandboxes of an instance, by the members' numbers, and what all of them are given."""

    seats: tuple[Seat, ...]
    workdir: Path
    bundle: IO[bytes]
    """To be closed once every seat has been given it: it takes its size in memory as long as it is open."""
    devices: tuple[str, ...] = (CPU,)
    """What the loader sessions may load to."""
    spans: tuple[Span, ...] = ()
    """What it took, in ms from the beginning on."""


async def prepare(
    order: StartInstance,
    suppliers: Suppliers,
    stack: AsyncExitStack,
    report: Report,
    clock: Callable[[], float],
    image: str = "",
) -> Prepared:
    """Everything for ``order``, its sandboxes of ``image``. What is acquired is freed by ``stack``, also when a part
    fails.

    Raises the first part's ``SllmError``.
    """
    times = StartTimes(report, clock)
    check_partitions(order)
    # The stack unwinds backwards: the directory goes last, when nothing can write to it any more.
    workdir = suppliers.workdirs.make(order.instance)
    stack.push_async_callback(suppliers.workdirs.remove, workdir)
    those = members(order.manifest.parallelism)
    for member in those if order.model is not None else ():
        # Runs after all sandboxes are closed: only then may their chunks be used again. Also for one that never was.
        stack.push_async_callback(suppliers.weights.gone, holder(order, member))
    tasks = (
        asyncio.ensure_future(times.timed(_sandboxes(order, image, those, suppliers, stack))),
        asyncio.ensure_future(times.timed(_bundle(order, suppliers, stack))),
        asyncio.ensure_future(_weights(order, those, suppliers, stack, times.told)),
    )
    try:
        sandboxes, bundle, (sessions, devices) = await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    seats = zip(those, sandboxes, sessions, strict=True)
    ready = tuple(Seat(member, sandbox, (bundle.fileno(), *session)) for member, sandbox, session in seats)
    return Prepared(ready, workdir, bundle, devices, times.spans())


def check_partitions(order: StartInstance) -> None:
    """Raise ``InvalidCheckpoint`` for a model that is not shared out as an instance of several processes needs it."""
    wanted = order.manifest.parallelism
    if order.model is None or wanted.processes == 1:
        return
    there, count = len(order.model.partitions), wanted.processes
    # Stages take their layers out of one partition too, but not to a GPU: there a partition has its memory whole.
    if there == count or (there == 1 and wanted.tensor == 1 and not order.gpus):
        return
    plan = f"--plan {'auto' if wanted.tensor > 1 else 'auto-stages'}:{count}"
    raise InvalidCheckpoint(
        f"the model has {there} partition(s), parallelism needs {count}; convert it with {plan}",
        field="parallelism",
        stage=WEIGHTS,
    )


def partitions_of(model: ModelRecord, member: Member) -> tuple[int, ...] | None:
    """Those that ``member`` may load: its own, where each process of the instance has one; None: all."""
    own = len(model.partitions) > 1 and max(member.stages, member.ranks) > 1
    return (member.number,) if own else None


async def image_of(order: StartInstance, images: Images | None, report: Report) -> str:
    """The image that the instance asks for, made first where this node lacks it; "": it asks for none.

    Raises ``ImageFailed``, ``Unavailable``.
    """
    manifest = order.manifest
    if manifest.image is None and not manifest.requirements:
        return ""
    if images is None:
        raise ImageFailed("this node's sandboxes are processes, which run from no image", stage=SANDBOX)
    with _stage(SANDBOX):
        return await images.ensure(
            manifest.image, manifest.requirements, lambda step: report(Progress(stage=SANDBOX, message=step))
        )


def check_python(order: StartInstance, python: str) -> None:
    """Raise ``PythonMismatch`` where a sandbox's Python cannot unpickle the function."""
    wanted = order.manifest.handler.python
    has = ".".join(python.split(".")[:2])
    if wanted and has != wanted:
        raise PythonMismatch(
            f"function {order.function!r} was pickled by Python {wanted}, image {order.manifest.image} runs {has}: "
            f"take one with Python {wanted}, or put the function in a file of its own, which is imported by name",
            field="image",
            stage=SANDBOX,
        )


def holder(order: StartInstance, member: Member) -> str:
    """The name that loaderd knows a member's sandbox by."""
    return f"{order.instance}.{member.number}" if member.number else order.instance


async def _sandboxes(
    order: StartInstance, image: str, those: Sequence[Member], suppliers: Suppliers, stack: AsyncExitStack
) -> tuple[Sandbox, ...]:
    made: list[Sandbox] = []
    wish = Wish(order.manifest.network, order.gpus, image=image)
    for _ in those:
        beside = made[0].name if made and clustered(order) else ""
        sandbox = await suppliers.pool.acquire(replace(wish, cluster=beside))
        stack.push_async_callback(sandbox.close)
        if order.manifest.image is not None:
            check_python(order, sandbox.python)
        await sandbox.confine(order.manifest.memory + order.weights, order.manifest.cpu)
        made.append(sandbox)
    return tuple(made)


async def _bundle(order: StartInstance, suppliers: Suppliers, stack: AsyncExitStack) -> IO[bytes]:
    with _stage(IMPORT):
        fd = await suppliers.bundles.open(order.bundle, order.bundle_bytes)
    return stack.enter_context(os.fdopen(fd, "rb", buffering=0))


async def _weights(
    order: StartInstance, those: Sequence[Member], suppliers: Suppliers, stack: AsyncExitStack, report: Report
) -> tuple[list[tuple[int, ...]], tuple[str, ...]]:
    """Each member's loader session, and the devices they may load to; no sessions without a model."""
    if order.model is None:
        return [() for _ in those], (CPU,)
    sessions: list[tuple[int, ...]] = []
    with _stage(WEIGHTS):
        devices = await suppliers.weights.devices(order.gpus)
        for member in those:
            fd = await suppliers.weights.grant(
                order.model,
                holder(order, member),
                report,
                partitions=partitions_of(order.model, member),
                adapters=tuple(order.adapters.values()),
                devices=devices,
            )
            stack.callback(os.close, fd)
            sessions.append((fd,))
    return sessions, devices


@contextmanager
def _stage(name: str) -> Iterator[None]:
    """Errors name the stage that needed what is missing."""
    try:
        yield
    except SllmError as error:
        error.stage = error.stage or name
        raise


def assignment(order: StartInstance, prepared: Prepared, seat: Seat, proofs: Proofs, edges: int = 0) -> Assign:
    """What the worker of ``seat`` is told; ``edges`` more descriptors join it to the others."""
    manifest = order.manifest
    home = seat.sandbox.home or str(prepared.workdir)
    return Assign(
        instance=order.instance,
        function=order.function,
        version=order.version,
        manifest=manifest,
        bundle=order.bundle,
        model=order.model.digest if order.model is not None else None,
        devices=prepared.devices,
        adapters={name: adapter.digest for name, adapter in order.adapters.items()},
        env={"TMPDIR": home, **manifest.env},
        memory_limit=manifest.memory + order.weights,
        threads=max(1, int(manifest.cpu)),
        gpus=order.gpus,
        proof=proofs.get(order),
        proofs=order.proofs,
        traceparent=trace.current(),
        workdir=home,
        member=seat.member,
        cluster=clustered(order),
        secrets=order.secrets,
        fds=len(seat.fds) + edges,
    )
