"""All layers on one accelerator, one step at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Many
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.batch import Batch, decodes_first
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.graphs import Computed, CudaRecorder, Graphs, Recorder
from sllm_runtime.worker.engine.ours.gpu.kv import DeviceKv
from sllm_runtime.worker.engine.ours.gpu.steps import DeviceSteps
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.runner import sampled
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence

KV_SHARE: Final = 0.8
"""The KV cache may take this part of what is free on a GPU when the engine starts: the model's bytes are there then."""


class DeviceRunner:
    """See ``Runner``. ``backend``: the decoder's. ``record``: makes graphs of decode steps; by itself it does on
    CUDA."""

    depth = 1
    layer_ranges = False
    lora = False

    def __init__(
        self, decoder: Decoder, backend: Device, numerics: Numerics, *, record: Recorder | None = None
    ) -> None:
        self._decoder = decoder
        self._backend = backend
        self._numerics = numerics
        self._on_cuda = backend.device.type == "cuda"
        self._shape = backend.kv_shape(decoder.count, decoder.heads, decoder.dtype)
        self._recorder = record
        self._steps: DeviceSteps | None = None
        self._last: Computed | None = None
        self._logits: torch.Tensor | None = None
        self._there: torch.cuda.Event | None = None
        self.graphs: Graphs | None = None
        """Of the current KV cache."""
        self.kv: DeviceKv | None = None

    def room(self, kv_bytes: int) -> int:
        """See ``Runner.room``. On CUDA the memory of the device counts, not ``kv_bytes``, which are the host's."""
        if self._on_cuda:
            kv_bytes = int(torch.cuda.mem_get_info(self._backend.device)[0] * KV_SHARE)
        return kv_bytes // self._shape.page_bytes

    def wake(self, pages: int) -> None:
        """See ``Runner.wake``. Raises ``OutOfMemory`` where the device has no room for them."""
        backend, decoder = self._backend, self._decoder
        with self._here():
            self.kv, self._steps = backend.cache(self._shape, pages, decoder.heads, self._numerics, decoder.dtype)
            record = self._recorder or (CudaRecorder() if self._on_cuda else None)
            self.graphs = None if record is None else Graphs(self._steps, self._compute, record)

    def sleep(self) -> None:
        """See ``Runner.sleep``. Graphs go with the cache that they read."""
        self.kv = self._steps = self.graphs = self._last = self._logits = None
        if self._on_cuda:
            torch.cuda.empty_cache()

    def launch(self, chunks: Many[Chunk], fresh: Many[int]) -> tuple[Sequence, ...]:
        """See ``Runner.launch``; begins the whole step, and the way of its logits to the CPU."""
        assert self.kv is not None
        assert self._steps is not None
        with torch.inference_mode(), self._here():
            for page in fresh:
                self.kv.clear(page)
            ordered = decodes_first(chunks)
            found = None if self.graphs is None else self.graphs.step(ordered)
            self._last = found or self._compute(self._steps.make(ordered))
            samples = sampled(chunks)
            self._send(None if self._last.logits is None else self._last.logits[: len(samples)])
        return samples

    def collect(self) -> torch.Tensor | None:
        """See ``Runner.collect``; waits for the device."""
        if self._there is not None:
            self._there.synchronize()
        logits, self._logits, self._there = self._logits, None, None
        return logits

    def close(self) -> None:
        """See ``Runner.close``."""

    def head(self, rows: Many[int]) -> torch.Tensor:
        """See ``Runner.head``."""
        assert self._last is not None
        with torch.inference_mode(), self._here():
            wanted = torch.tensor(rows, device=self._backend.device)
            return self._decoder.logits(self._last.hidden, wanted).cpu()

    def _compute(self, batch: Batch) -> Computed:
        decoder = self._decoder
        hidden = decoder.run(decoder.begin(batch), batch, 0, decoder.count)
        return Computed(hidden, decoder.logits(hidden, batch.wanted) if len(batch.wanted) else None)

    def _send(self, logits: torch.Tensor | None) -> None:
        """Begin to bring ``logits`` to the CPU."""
        self._logits, self._there = logits, None
        if self._on_cuda and logits is not None:
            self._logits = torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True)
            self._logits.copy_(logits, non_blocking=True)
            self._there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._there.record()

    def _here(self) -> contextlib.AbstractContextManager[object]:
        """Kernels are launched on the current device, which each thread has of its own."""
        return torch.cuda.device(self._backend.device) if self._on_cuda else contextlib.nullcontext()
