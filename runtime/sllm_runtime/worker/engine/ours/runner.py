"""Who computes a step: this process, or several. The engine decides what a step is, and what becomes of its logits."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Protocol

import torch

from sllm_runtime.worker.engine.ours.adapter import Adapter
from sllm_runtime.worker.engine.ours.batch import decodes_first
from sllm_runtime.worker.engine.ours.model.backend import Kv, Steps
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.sampler import Likeliest
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence

Head = Callable[[Many[int]], torch.Tensor]
"""Float32 logits (rows, vocabulary), on the CPU, of any rows of the step that was launched last."""


class Runner(Protocol):
    """Steps are launched and collected in one order. Used from the engine's thread only.

    ``launch`` and ``collect`` raise the ``SllmError`` that kept the step from being computed; what was launched and not
    collected is then lost.
    """

    @property
    def depth(self) -> int:
        """Steps that may be on their way at once."""

    @property
    def layer_ranges(self) -> bool:
        """Whether any range of its layers may be a stage in a process of its own."""

    @property
    def lora(self) -> bool:
        """Whether rows may go through adapters."""

    @property
    def rehearses(self) -> bool:
        """Whether a step is slower with a number of rows that it has not had, so that one for nobody is worth it."""

    @property
    def kv(self) -> Kv | None:
        """The KV cache, where this process holds all of it and is awake."""

    @property
    def head(self) -> Head | None:
        """Of any rows of the last step; None where other processes have a part of the model."""

    def room(self, kv_bytes: int) -> int:
        """Pages that fit, when each process of this runner may use ``kv_bytes``; 0 if not one does. Raises
        ``OutOfMemory`` where other memory than the host's counts and has no room for one."""

    def wake(self, pages: int) -> None:
        """Hold a KV cache of so many pages, with nothing in it."""

    def sleep(self) -> None:
        """Give the KV cache back."""

    def launch(self, chunks: Many[Chunk], fresh: Many[int]) -> tuple[Sequence, ...]:
        """Begin a step. ``fresh``: pages that hold what somebody else left there. Returns whose rows a token is chosen
        from, in the order of the logits."""

    def collect(self) -> torch.Tensor | Likeliest | None:
        """Float32 logits (at least as many rows as were wanted, vocabulary) of the oldest step on its way, on the CPU,
        or what is likeliest by them, where all that is asked for; ``None`` where no row was wanted."""

    def close(self) -> None:
        """Give back what joins this process to others. Repeatable."""


def sampled(chunks: Many[Chunk]) -> tuple[Sequence, ...]:
    """Whose rows a step gives logits of."""
    return tuple(chunk.sequence for chunk in decodes_first(chunks) if chunk.samples)


def adapted(chunks: Many[Chunk]) -> list[tuple[Adapter | None, int]]:
    """The adapter of each, and how many rows, in the order in which a step has them."""
    return [(chunk.sequence.adapter, chunk.count) for chunk in decodes_first(chunks)]


class LocalRunner:
    """All layers in this process, one step at a time."""

    depth = 1
    layer_ranges = True
    lora = True
    rehearses = True

    def __init__(self, decoder: Decoder, numerics: Numerics) -> None:
        self._decoder = decoder
        self._numerics = numerics
        self._shape = decoder.backend.kv_shape(decoder.count, decoder.heads, decoder.dtype)
        self._steps: Steps | None = None
        self._logits: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        self.kv: Kv | None = None

    def room(self, kv_bytes: int) -> int:
        """See ``Runner.room``."""
        return kv_bytes // self._shape.page_bytes

    def wake(self, pages: int) -> None:
        """See ``Runner.wake``."""
        decoder = self._decoder
        self.kv, self._steps = decoder.backend.cache(self._shape, pages, decoder.heads, self._numerics, decoder.dtype)

    def sleep(self) -> None:
        """See ``Runner.sleep``."""
        self.kv = self._steps = None

    def launch(self, chunks: Many[Chunk], fresh: Many[int]) -> tuple[Sequence, ...]:
        """See ``Runner.launch``; computes the whole step."""
        assert self.kv is not None
        assert self._steps is not None
        with torch.inference_mode():
            for page in fresh:
                self.kv.clear(page)
            batch = self._steps.make(chunks)
            self._decoder.lora.begin(adapted(chunks))
            hidden = self._decoder.run(self._decoder.begin(batch), batch, 0, self._decoder.count)
            self._logits = self._decoder.logits(hidden, batch.wanted) if len(batch.wanted) else None
            self._hidden = hidden
        return sampled(chunks)

    def collect(self) -> torch.Tensor | None:
        """See ``Runner.collect``."""
        logits, self._logits = self._logits, None
        return logits

    def close(self) -> None:
        """See ``Runner.close``."""

    def head(self, rows: Many[int]) -> torch.Tensor:
        """See ``Runner.head``."""
        assert self._hidden is not None
        padding = self._numerics.padded(len(rows)) - len(rows)
        with torch.inference_mode():
            return self._decoder.logits(self._hidden, torch.tensor([*rows, *[0] * padding]))[: len(rows)]
