"""An instance's start: bundle, user's module, weights, engine, setup. The weights come while the module is imported,
and where our engine runs the model they may go on coming when the instance is ready."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import importlib.metadata
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from sllm_runtime.protocol.errors import OutOfMemory, SllmError, StartFailed, UnsupportedModel
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.timeline import IMPORT, PROVE, SETUP, START_STAGES, WEIGHTS, Span
from sllm_runtime.protocol.worker import Assign
from sllm_runtime.worker import adapters, bundle, handler
from sllm_runtime.worker.arriving import Report, Weights
from sllm_runtime.worker.calls import run_async, run_sync, users_part
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.joined import Joined
from sllm_runtime.worker.model import load_model
from sllm_runtime.worker.own import Foreign
from sllm_runtime.worker.secret_files import lay
from sllm_runtime.worker.words import NO_THREAD, lacks_memory, lacks_thread, sendable, words_of

_ORDER: Final = (*START_STAGES, PROVE)


@dataclass(slots=True)
class Stages:
    """Times the stages of a start; ``current`` is where it stands, for errors."""

    report: Report
    began: float
    """``perf_counter`` when ``Assign`` arrived."""
    spans: list[Span] = field(default_factory=list)
    current: str = IMPORT

    @contextlib.contextmanager
    def stage(self, name: str, since: float | None = None) -> Iterator[None]:
        """Everything inside is ``name``, and what was done for it from ``since`` on (``perf_counter``)."""
        self.begin(name)
        start = since or time.perf_counter()
        yield
        self.over(name, time.perf_counter() - start)

    def over(self, name: str, seconds: float) -> None:
        """``name`` has ended just now, and took so long."""
        at = time.perf_counter() - seconds - self.began
        self.spans.append(Span(name, round(at * 1000, 3), round(seconds * 1000, 3)))

    def begin(self, name: str) -> None:
        """``name`` begins; its span is known later."""
        self.current = name
        self.report(name, 0, 0)

    def told(self, spans: tuple[Span, ...]) -> tuple[Span, ...]:
        """All spans with ``spans`` among them, in the stages' order."""
        return tuple(sorted((*self.spans, *spans), key=lambda span: _ORDER.index(span.name)))


@dataclass(frozen=True, slots=True)
class Started:
    """A function that can be called. ``run`` produces one call's outputs, as a coroutine where ``on_loop``."""

    run: Callable[..., Any]
    on_loop: bool
    handle: ModelHandle | None
    fingerprint: str
    capabilities: tuple[str, ...]
    proof: str = ""
    """See ``Ready``."""
    spans: tuple[Span, ...] = ()
    """Of the stages that are over."""
    model: Weights | None = None
    """Its loads, which may still be on their way (``late``)."""
    late: bool = False


def confine(assign: Assign) -> Path:
    """Environment, directory and limits of the instance; returns where its code goes."""
    import torch

    os.environ.update({**assign.manifest.env, **assign.env})
    time.tzset()  # by the new TZ: Python has asked for it when it began
    tempfile.tempdir = None  # by the new TMPDIR: what the fork server imports has asked where its own files lie
    hub = sys.modules.get("huggingface_hub.constants")
    if hub is not None and any(name.startswith("HF_") for name in assign.manifest.env):
        importlib.reload(hub)  # by the new HF_HOME, HF_HUB_OFFLINE and so on, at which it looks once
    home = Path(assign.workdir or tempfile.mkdtemp(prefix="sllm-worker-"))
    code = home / "code"
    code.mkdir(parents=True, exist_ok=True)
    # The processes of one instance share its directory.
    lay(assign.secrets, home / (f"secrets-{assign.member.number}" if assign.member.number else "secrets"))
    os.chdir(code)
    torch.set_num_threads(assign.threads)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(assign.threads)  # for what the function starts; the fork server had 1
    if assign.memory_limit:
        # What the fork server had mapped before is shared, and not the function's: it is added.
        limit = assign.memory_limit + data_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    return home


def data_bytes() -> int:
    """VmData of this process: what RLIMIT_DATA counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def import_user(manifest: Manifest, fd: int, home: Path) -> tuple[Any, ModuleType | None]:
    """Unpack the bundle behind ``fd`` and import the user's object."""
    code = home / "code"
    bundle.unpack(fd, code)
    return bundle.import_target(manifest.handler, code)


async def prepare(target: Any, handle: ModelHandle | None, manifest: Manifest) -> tuple[Callable[..., Any], bool]:
    """What runs a call of ``target``, and whether on the event loop. Runs a class's ``setup``."""
    function = await handler.instantiate(target, handle) if isinstance(target, type) else target
    user = handler.bind(function, handle)
    runner = run_async if user.on_loop else run_sync
    return runner(user.call, user.arguments.parse), user.on_loop


async def start(assign: Assign, fds: list[int], stages: Stages) -> Started:
    """Become the instance that ``assign`` describes. Raises ``SllmError`` with the stage that failed."""
    try:
        return await _start(assign, fds, stages)
    except BaseException as error:  # user code may raise anything, SystemExit included
        raise failed(error, stages.current) from error


async def _start(assign: Assign, fds: list[int], stages: Stages) -> Started:
    manifest = assign.manifest
    joined = Joined.of(assign, fds)
    pending = None
    if len(fds) > 1 and joined is None:
        pending = Weights.begin(fds[1], assign.instance, manifest.startup_timeout, assign.devices)
    handle: ModelHandle | None = None
    with stages.stage(IMPORT):
        home = confine(assign)
        target, module = import_user(manifest, fds[0], home)
    imported = time.perf_counter()
    if joined is not None:
        from sllm_runtime.worker import parts  # few starts need it

        stages.begin(WEIGHTS)
        pending, handle = parts.head(assign, joined, fds[1], home, stages.report)
    elif pending is not None:
        stages.begin(WEIGHTS)
        handle = load_model(manifest, home, pending, module, stages.report, assign.proof, assign.proofs)
    if handle is not None and pending is not None:
        load = adapters.loader(pending, manifest.startup_timeout)
        room = manifest.memory // adapters.SHARE
        handle.adapters = adapters.Adapters(assign.adapters, load, room, manifest.startup_timeout)
    capabilities: tuple[str, ...] = ()
    proof = ""
    # What of the model is made before its bytes are there is setup too; what was waited for them is not.
    waited = pending.ended if pending is not None and pending.ended is not None else imported
    with stages.stage(SETUP, max(imported, waited)):
        if handle is not None and manifest.engine:
            loop, _ = handle.engine()
            capabilities = (f"engine:{loop.engine.name}", *loop.engine.capabilities.names())
            proof = loop.proof
            if loop.proved_s:
                stages.over(PROVE, loop.proved_s)
        run, on_loop = await prepare(target, handle, manifest)
    if pending is not None and pending.error is not None:
        stages.current = WEIGHTS
        raise pending.error
    weights = () if pending is None else pending.span(stages.began)
    return Started(
        run,
        on_loop,
        handle,
        fingerprint(assign, handle),
        capabilities,
        proof,
        spans=stages.told(weights),
        model=pending,
        late=pending is not None and not weights,
    )


def fingerprint(assign: Assign, handle: ModelHandle | None) -> str:
    """What decides the bits of this instance's numbers: libraries, CPU, threads, dtype, weights, engine."""
    import torch

    if handle is not None and assign.manifest.engine and (own := handle.engine()[0].engine.fingerprint):
        return own
    dtype = next((str(p.dtype) for p in handle.module.parameters()), "") if handle is not None else ""
    parts = (
        torch.__version__,
        "" if handle is None else transformers_version(),
        torch.backends.cpu.get_cpu_capability(),
        str(assign.threads),
        dtype,
        assign.model or "",
        "transformers",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def transformers_version() -> str:
    """Imported or not: that is chance. Its file is parsed for it, which takes 3 ms."""
    return importlib.metadata.version("transformers")


def failed(error: BaseException, stage: str) -> SllmError:
    """A start's failure as all who wait for it see it: 503, its stage, its reason; the traceback for the log.

    A model that cannot run keeps its code, for who deploys it; the controller tells callers 503 all the same.
    """
    trace = sendable("".join(traceback.format_exception(type(error), error, users_part(error))))[-64 * 1024 :]
    if isinstance(error, SllmError):
        if error.status >= 500 or isinstance(error, StartFailed | UnsupportedModel):
            error.stage, error.detail = error.stage or stage, error.detail or trace
            return error
        return StartFailed(error.message, field=error.field, stage=stage, detail=trace)
    text = str(error) if isinstance(error, Foreign) else words_of(error)
    if lacks_memory(error) and not isinstance(error, Foreign):  # whose memory is another function's
        return OutOfMemory(
            f"the function ran out of memory during {stage} ({text[:200]}); raise memory=... in @model_function",
            stage=stage,
            detail=trace,
        )
    why = NO_THREAD if lacks_thread(error) else ""
    return StartFailed(f"{stage} failed: {text[:2000]}{why}", stage=stage, detail=trace)
