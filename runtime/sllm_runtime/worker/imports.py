"""What a fork server imports: first what every worker needs, the rest while nobody asks for one.

Transformers takes more of a CPU than everything else together (2.1 of 3.6 s), and our engine needs it for no model of
the commonest families; so nobody who waits for a worker waits for it.
"""

from __future__ import annotations

import codecs
import contextlib
import gc
import importlib
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from sllm_runtime.platform.daemon import loop_factory
from sllm_runtime.protocol.errors import InternalError

PRELOAD: Final = (
    "numpy",
    "torch",
    "torch.nn",
    "tokenizers",
    "pydantic",
    "jinja2.sandbox",
    "sllm_runtime.worker.engine.choice",
    "sllm_runtime.worker.main",
)
"""What a start with our engine needs."""
USERS: Final = ("sllm", "sllm.function", "sllm.signature")
"""What users' modules import first, where it is installed."""
LATER: Final = (
    "huggingface_hub.hf_api",
    "transformers",
    "sympy",
    "torch.distributed.tensor",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch._dynamo",
    "transformers.models.auto.configuration_auto",
    "transformers.conversion_mapping",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "sllm_runtime.worker.engine.transformers_engine",
)
"""What other models need, cut where transformers imports much at once: none takes more than 0.5 s of a CPU. A worker
that was forked before imports what it lacks itself; other architectures are imported when a worker first wants them."""
QUIET_S: Final = 1.0
"""Nothing is imported later until nobody has asked for a worker, and none has died, for so long."""
SINGLE_THREADED: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Read once, when numpy and torch are imported; OpenBLAS starts threads otherwise."""


def preload() -> float:
    """Import what every worker needs; seconds it took. Raises ``InternalError`` if that started a thread."""
    began = time.perf_counter()
    os.environ.update(SINGLE_THREADED)
    with _importing(PRELOAD):
        for name in PRELOAD:
            importlib.import_module(name)
        if _sees_gpu():
            _prime_gpu()
        for name in USERS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        loop_factory()  # imports uvloop
        from sllm_runtime.worker.engine.ours.kernels.loaded import kernels  # with LLVM, which process 1 has no need of
        from sllm_runtime.worker.engine.ours.model import slabs

        kernels()
        slabs.available()  # found out by products, the first of which take 14 ms: no start is to wait for that
        _prime()
    return time.perf_counter() - began


def _sees_gpu() -> bool:
    return any(name.startswith("nvidia") for name in os.listdir("/dev"))


def _prime_gpu() -> None:
    """What a start on a GPU needs besides, where it is installed: more than half a second of it. No CUDA yet, of which
    nothing outlives a fork."""
    with contextlib.suppress(ImportError, RuntimeError):  # there may be no libcuda beside a GPU
        from sllm_loaderd.client.cuda_driver import import_driver

        import_driver()
    with contextlib.suppress(ImportError):
        from sllm_runtime.worker.engine.ours.gpu.exact import prime

        prime()


def _prime() -> None:
    """What each start would else find out for itself, and always the same: 10 ms of it."""
    from sllm_runtime.protocol import codec, loader, worker
    from sllm_runtime.worker import console, start

    codec.prime(worker.ToWorker, loader.Answer)
    start.transformers_version()
    console.own_loggers()
    codecs.lookup("cp437")  # of names in zip files


class Later:
    """The rest, one name at a time: who asks for a worker meanwhile waits for one at most."""

    def __init__(self, preload: str) -> None:
        """``preload``: a ``Preload``."""
        self._left = deque(LATER if preload == "all" else ())

    @property
    def done(self) -> bool:
        """Whether nothing is left."""
        return not self._left

    def step(self) -> None:
        """Import the next. Raises ``InternalError`` if that started a thread."""
        name = self._left.popleft()
        with _importing((name,)):
            importlib.import_module(name)
            if self.done:
                _touch()


@contextlib.contextmanager
def _importing(names: Sequence[str]) -> Iterator[None]:
    """The collector rests meanwhile: what an import makes it keeps, and looking for garbage in it again and again takes
    a fifth of the imports' time. It ends frozen, not collected: there is little to find (about 9 MB, which all workers
    share), and looking once takes 0.2 to 0.4 s of a start that may be waiting.
    """
    gc.disable()
    try:
        yield
        threads = len(os.listdir("/proc/self/task"))
        if threads != 1:
            raise InternalError(f"importing {', '.join(names)} left {threads} threads; a fork would copy only one")
        gc.freeze()  # a collection in a child would otherwise write to, and so copy, every page of objects
    finally:
        gc.enable()


def _touch() -> None:
    """Resolve what transformers imports lazily, by name."""
    import transformers

    for name in ("LlamaConfig", "LlamaForCausalLM", "PreTrainedModel", "DynamicCache", "CONFIG_MAPPING"):
        getattr(transformers, name)
