"""All layers on one accelerator, one step at a time."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final

import torch

from sllm_runtime.protocol.errors import OutOfMemory
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.worker.engine.ours.batch import Batch, decodes_first
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.graphs import Computed, CudaRecorder, Graphs, Recorder
from sllm_runtime.worker.engine.ours.gpu.kv import DeviceKv
from sllm_runtime.worker.engine.ours.gpu.steps import DeviceSteps
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import PAGE
from sllm_runtime.worker.engine.ours.runner import adapted, sampled
from sllm_runtime.worker.engine.ours.sampler import Likeliest, likeliest, plain
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence

KV_SHARE: Final = 0.8
"""The KV cache may take this part of what is there for it; the rest is the activations' and the adapters'."""


def pages_in(page_bytes: int, free: int, granted: int | None) -> int:
    """How many pages an engine may have where ``free`` bytes of a GPU are free beside the model's weights, and
    ``granted`` are what ``gpu_memory`` leaves beside them (None: it says nothing). Raises ``OutOfMemory`` where not one
    does: then no request could ever run."""
    left = free if granted is None else min(free, granted)
    pages = max(0, int(left * KV_SHARE)) // page_bytes
    if pages:
        return pages
    least = show_bytes(-(-page_bytes // KV_SHARE))
    if granted is not None and granted <= free:
        raise OutOfMemory(
            f"gpu_memory leaves {show_bytes(granted)} beside the model's weights, one page of its KV cache ({PAGE} "
            f"tokens) needs {least}; raise gpu_memory=... in @model_function"
        )
    raise OutOfMemory(
        f"the GPU has {show_bytes(free)} free beside the model's weights, one page of its KV cache ({PAGE} tokens) "
        f"needs {least}; end what else uses it, or ask for a GPU with more (gpu_memory=... in @model_function)"
    )


class DeviceRunner:
    """See ``Runner``. ``backend``: the decoder's. ``granted``: bytes of the device that may be taken beside the
    weights; None: what is free. ``record``: makes graphs of decode steps; by itself it does on CUDA."""

    depth = 1
    layer_ranges = False
    lora = True
    rehearses = False

    def __init__(
        self, decoder: Decoder, backend: Device, numerics: Numerics, *, granted: int | None = None,
        record: Recorder | None = None,
    ) -> None:  # fmt: skip
        self._decoder = decoder
        self._backend = backend
        self._numerics = numerics
        self._on_cuda = backend.device.type == "cuda"
        self._shape = backend.kv_shape(decoder.count, decoder.heads, decoder.dtype)
        self._granted = granted
        self._recorder = record
        self._steps: DeviceSteps | None = None
        self._last: Computed | None = None
        self._found: torch.Tensor | Likeliest | None = None
        self._there: torch.cuda.Event | None = None
        self.graphs: Graphs | None = None
        """Of the current KV cache."""
        self.kv: DeviceKv | None = None

    def room(self, kv_bytes: int) -> int:
        """See ``Runner.room``. Where the device has memory of its own that counts, not ``kv_bytes``, the host's."""
        if self._backend.free is None:
            return kv_bytes // self._shape.page_bytes
        return pages_in(self._shape.page_bytes, self._backend.free(), self._granted)

    def wake(self, pages: int) -> None:
        """See ``Runner.wake``. Raises ``OutOfMemory`` where the device has no room for them."""
        backend, decoder = self._backend, self._decoder
        with backend.current():
            self.kv, self._steps = backend.cache(self._shape, pages, decoder.heads, self._numerics, decoder.dtype)
            record = self._recorder or (CudaRecorder() if self._on_cuda else None)
            self.graphs = None if record is None else Graphs(self._steps, self._compute, record)

    def sleep(self) -> None:
        """See ``Runner.sleep``. Graphs go with the cache that they read."""
        self.kv = self._steps = self.graphs = self._last = self._found = None
        if self._on_cuda:
            torch.cuda.empty_cache()

    def launch(self, chunks: Many[Chunk], fresh: Many[int]) -> tuple[Sequence, ...]:
        """See ``Runner.launch``; begins the whole step, and the way of what is asked of it to the CPU: ids where all
        rows are plain, else logits."""
        assert self.kv is not None
        assert self._steps is not None
        with torch.inference_mode(), self._backend.current():
            for page in fresh:
                self.kv.clear(page)
            ordered = decodes_first(chunks)
            lora = self._decoder.lora
            lora.begin(adapted(ordered))
            # A graph has one set of kernels; which adapters there are, and of how many rows, changes from step to step.
            recorded = None if self.graphs is None or lora.groups else self.graphs.step(ordered)
            last = self._last = recorded or self._compute(self._steps.make(ordered))
            samples = sampled(ordered)
            if last.best is not None and all(map(plain, samples)):
                self._found = Likeliest(self._sent(last.best[: len(samples)]))
            else:
                self._found = None if last.logits is None else self._sent(last.logits[: len(samples)])
        return samples

    def collect(self) -> torch.Tensor | Likeliest | None:
        """See ``Runner.collect``; waits for the device."""
        if self._there is not None:
            self._there.synchronize()
        found, self._found, self._there = self._found, None, None
        return found

    def close(self) -> None:
        """See ``Runner.close``."""

    def head(self, rows: Many[int]) -> torch.Tensor:
        """See ``Runner.head``."""
        assert self._last is not None
        with torch.inference_mode(), self._backend.current():
            wanted = torch.tensor(rows, device=self._backend.device)
            return self._decoder.logits(self._last.hidden, wanted).cpu()

    def _compute(self, batch: Batch) -> Computed:
        decoder = self._decoder
        hidden = decoder.run(decoder.begin(batch), batch, 0, decoder.count)
        if not len(batch.wanted):
            return Computed(hidden, None, None)
        logits = decoder.logits(hidden, batch.wanted)
        return Computed(hidden, logits, likeliest(logits))

    def _sent(self, rows: torch.Tensor) -> torch.Tensor:
        """Begin to bring ``rows`` to the CPU: where they will be."""
        if not self._on_cuda:
            return rows
        there = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
        there.copy_(rows, non_blocking=True)
        self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._there.record()
        return there
