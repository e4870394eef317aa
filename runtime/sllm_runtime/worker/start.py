"""An instance's start: bundle, user's module, weights, engine, setup. The weights come while the module is imported."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from sllm_loaderd.client import LoaderSession, SessionLoad
from sllm_runtime.protocol.errors import (
    DeadlineExceeded,
    FunctionError,
    InvalidBundle,
    OutOfMemory,
    SllmError,
    StartFailed,
    UnsupportedModel,
)
from sllm_runtime.protocol.manifest import Manifest
from sllm_runtime.protocol.timeline import IMPORT, SETUP, WEIGHTS, Span
from sllm_runtime.protocol.worker import Assign
from sllm_runtime.worker import bundle, handler, weights
from sllm_runtime.worker.calls import run_async, run_sync
from sllm_runtime.worker.engine.loop import EngineLoop
from sllm_runtime.worker.handle import ModelHandle
from sllm_runtime.worker.tokens import Tokens
from sllm_runtime.worker.words import sendable, words_of

log = logging.getLogger(__name__)
_PROGRESS_S = 0.25
_KV_SHARE = 4
"""The KV cache may take this part of the manifest's memory; the rest is the function's and the activations'."""
Report = Callable[[str, int, int], None]
"""Told of each stage's beginning and of bytes: ``(stage, done, total)``."""


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
        """Everything inside is ``name``; ``since``: it began earlier, in the background."""
        self.current = name
        start = since or time.perf_counter()
        self.report(name, 0, 0)
        yield
        now = time.perf_counter()
        self.spans.append(Span(name, round((start - self.began) * 1000, 3), round((now - start) * 1000, 3)))


@dataclass(slots=True)
class Weights:
    """A load on its way: it began at ``began`` and runs while the user's module is imported."""

    session: LoaderSession
    load: SessionLoad
    began: float

    @classmethod
    def begin(cls, fd: int, name: str) -> Weights:
        """Ask loaderd for the model behind the session ``fd``."""
        began = time.perf_counter()
        session = LoaderSession(fd, name=name)
        return cls(session, session.load(), began)

    def wait(self, timeout_s: float, report: Report) -> None:
        """Until every byte is there, telling of progress. Raises the load's error or ``DeadlineExceeded``."""
        until = time.monotonic() + timeout_s
        while True:
            try:
                self.load.wait_all(min(_PROGRESS_S, max(0.0, until - time.monotonic())))
            except DeadlineExceeded:
                report(WEIGHTS, *self.load.progress)
                if time.monotonic() >= until:
                    raise
            else:
                return


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


def confine(assign: Assign) -> Path:
    """Environment, directory and limits of the instance; returns where its code goes."""
    import torch

    os.environ.update({**assign.manifest.env, **assign.env})
    home = Path(assign.workdir or tempfile.mkdtemp(prefix="sllm-worker-"))
    code = home / "code"
    code.mkdir(parents=True, exist_ok=True)
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


def load_model(
    manifest: Manifest, home: Path, pending: Weights, module: ModuleType | None, report: Report, proof: str = ""
) -> ModelHandle:
    """Build the module, bind its tensors, wait for their bytes. ``proof``: see ``Assign``."""
    timeout = manifest.startup_timeout
    index, files = pending.load.index(timeout), pending.load.files(timeout)
    config = weights.read_config(files)
    memory = pending.load.attach(timeout).exporter()
    tensors = weights.CheckpointTensors(index, memory)
    dtype = weights.compute_dtype(manifest.dtype, config, tensors)
    if manifest.model_loader == "build":
        build = getattr(module, "build", None)
        if build is None:
            raise InvalidBundle("model_loader is 'build', but the function's module defines no build()")
        net = weights.build_custom(build, config, dtype)
    else:
        net = weights.build_known(config, manifest.model_loader, dtype)
    copies = dtype != tensors.floating_dtype()
    if copies:  # a cast reads every byte
        pending.wait(timeout, report)
    weights.bind(net, tensors, dtype)
    if not copies:
        pending.wait(timeout, report)
    options = {"kv_bytes": manifest.memory // _KV_SHARE, "model": pending.session.model, "proof": proof}
    return ModelHandle(net, files, home / "model", lambda: start_engine(net, files, config, **options))


def start_engine(
    module: Any, files: Mapping[str, bytes], config: Mapping[str, Any], **options: Any
) -> tuple[EngineLoop, Tokens]:
    """The engine for ``module`` on its thread; ``options`` are those of ``choose_engine``. Raises ``FunctionError`` if
    it is no causal language model."""
    from sllm_runtime.worker.engine.choice import choose_engine

    if not hasattr(module, "lm_head") and getattr(module, "get_output_embeddings", lambda: None)() is None:
        raise FunctionError(f"{type(module).__name__} generates no text; use model.module")
    tokens = _tokens(files)
    chosen = choose_engine(module, files, config, **options)
    loop = EngineLoop(chosen.engine, tokens, proof=chosen.proof)
    loop.start()
    return loop, tokens


def _tokens(files: Mapping[str, bytes]) -> Tokens:
    if "tokenizer.json" in files:
        return Tokens.from_json(files["tokenizer.json"])
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory(prefix="sllm-tokenizer-") as name:
        for file, data in files.items():
            (Path(name) / file).write_bytes(data)
        try:
            slow = AutoTokenizer.from_pretrained(name, local_files_only=True)
            return Tokens(slow.backend_tokenizer)
        except Exception as error:  # transformers raises many kinds for files it cannot use
            raise StartFailed(f"the model has no tokenizer that can be used: {error}", stage=SETUP) from error


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
    pending = Weights.begin(fds[1], assign.instance) if len(fds) > 1 else None
    handle: ModelHandle | None = None
    with stages.stage(IMPORT):
        home = confine(assign)
        target, module = import_user(manifest, fds[0], home)
    if pending is not None:
        with stages.stage(WEIGHTS, pending.began):
            handle = load_model(manifest, home, pending, module, stages.report, assign.proof)
    capabilities: tuple[str, ...] = ()
    proof = ""
    with stages.stage(SETUP):
        if handle is not None and manifest.engine:
            loop, _ = handle.engine()
            capabilities = (f"engine:{loop.engine.name}", *loop.engine.capabilities.names())
            proof = loop.proof
        run, on_loop = await prepare(target, handle, manifest)
    return Started(run, on_loop, handle, fingerprint(assign, handle), capabilities, proof)


def fingerprint(assign: Assign, handle: ModelHandle | None) -> str:
    """What decides the bits of this instance's numbers: libraries, CPU, threads, dtype, weights, engine."""
    import torch

    if handle is not None and assign.manifest.engine and (own := handle.engine()[0].engine.fingerprint):
        return own
    dtype = next((str(p.dtype) for p in handle.module.parameters()), "") if handle is not None else ""
    parts = (
        torch.__version__,
        sys.modules["transformers"].__version__ if "transformers" in sys.modules else "",
        torch.backends.cpu.get_cpu_capability(),
        str(assign.threads),
        dtype,
        assign.model or "",
        "transformers",
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def failed(error: BaseException, stage: str) -> SllmError:
    """A start's failure as all who wait for it see it: 503, its stage, its reason; the traceback for the log.

    A model that cannot run keeps its code, for who deploys it; the controller tells callers 503 all the same.
    """
    trace = sendable("".join(traceback.format_exception(error)))[-64 * 1024 :]
    if isinstance(error, SllmError):
        if error.status >= 500 or isinstance(error, StartFailed | UnsupportedModel):
            error.stage, error.detail = error.stage or stage, error.detail or trace
            return error
        return StartFailed(error.message, field=error.field, stage=stage, detail=trace)
    text = words_of(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in text or "not enough memory" in text:
        return OutOfMemory(
            f"the function ran out of memory during {stage} ({text[:200]}); raise memory=... in @model_function",
            stage=stage,
            detail=trace,
        )
    return StartFailed(f"{stage} failed: {text[:2000]}", stage=stage, detail=trace)
