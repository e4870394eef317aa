"""A runner whose steps are computed together with followers: it says what a step is and computes its own part."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Final

import torch

from sllm_runtime.protocol.errors import InstanceLost, InternalError, OutOfMemory, SllmError
from sllm_runtime.protocol.stages import LayerRange, OnEdge, Part, Sleep, Step, Wake
from sllm_runtime.worker.engine.ours.batch import Batch, decodes_first
from sllm_runtime.worker.engine.ours.model.backend import Kv, Steps
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import pages_for
from sllm_runtime.worker.engine.ours.runner import adapted, sampled
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Sequence

log = logging.getLogger(__name__)
CAUSE_S: Final = 5.0
"""How long followers have to say what happened, when one of them is gone."""


class Driver(ABC):
    """A ``Runner``. The first error ends it, and the followers too: whoever comes later hears that they are lost, since
    what it was is no word on him."""

    kv: Kv | None = None
    """No process has all of it."""
    head = None
    layer_ranges = False
    lora = False
    rehearses = False
    tokens = False
    """Whether followers are told the ids of a step."""

    def __init__(self, decoder: Decoder, layers: LayerRange, numerics: Numerics, depth: int) -> None:
        self.depth = depth
        self._decoder = decoder
        self._layers = layers
        self._numerics = numerics
        self._shape = decoder.backend.kv_shape(layers.high - layers.low, decoder.heads, decoder.dtype)
        self._pages = 0
        """For which every follower has room."""
        self._batches: Steps | None = None
        self._store: Kv | None = None
        self._launched = 0
        self._lost: SllmError | None = None

    @abstractmethod
    def _tell(self, message: OnEdge) -> None:
        """Send to every follower."""

    @abstractmethod
    def _run(self, number: int, batch: Batch) -> None:
        """Compute this process's part of a step."""

    @abstractmethod
    def _collect(self) -> torch.Tensor | None:
        """See ``Runner.collect``."""

    @abstractmethod
    def _cause(self, error: InstanceLost) -> SllmError:
        """What followers say of ``error``."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what joins the processes. Repeatable."""

    def _lent(self, chunks: Many[Chunk]) -> list[int | None]:
        """By which numbers the followers know the adapters of ``chunks``; they are told of new ones."""
        return [None] * len(chunks)

    def _settle(self, pages: int) -> None:
        """Every process has room for ``pages``. Raises ``OutOfMemory`` if that is none."""
        if not pages:
            raise OutOfMemory(
                "a process of this engine has no room for one page of KV cache; raise memory=... in @model_function"
            )
        self._pages = pages

    def close(self) -> None:
        """The followers end too. Repeatable."""
        self._lost = self._lost or InstanceLost("this engine is closed")
        self._release()

    def room(self, kv_bytes: int) -> int:
        """See ``Runner.room``: that of the process which has the least, each by what it was given when it was made. On
        a GPU that is the GPU's memory, and not ``kv_bytes`` of the host's."""
        return self._pages

    def wake(self, pages: int) -> None:
        """See ``Runner.wake``."""
        with self._failing():
            decoder = self._decoder
            self._store, self._batches = decoder.backend.cache(
                self._shape, pages, decoder.heads, self._numerics, decoder.dtype
            )
            self._tell(Wake(pages))

    def sleep(self) -> None:
        """See ``Runner.sleep``. Steps on their way are computed before."""
        self._store = self._batches = None
        with self._failing():
            self._tell(Sleep())

    def launch(self, chunks: Many[Chunk], fresh: Many[int]) -> tuple[Sequence, ...]:
        """See ``Runner.launch``; computes this process's part."""
        assert self._store is not None
        assert self._batches is not None
        number, self._launched = self._launched, self._launched + 1
        with self._failing(), self._computing(), torch.inference_mode():
            ordered = decodes_first(chunks)
            self._tell(Step(number, tuple(map(self._said, ordered, self._lent(ordered))), tuple(fresh)))
            self._decoder.lora.begin(adapted(chunks))
            for page in fresh:
                self._store.clear(page)
            self._run(number, self._batches.make(chunks))
        return sampled(chunks)

    def collect(self) -> torch.Tensor | None:
        """See ``Runner.collect``."""
        with self._failing(), self._computing(), torch.inference_mode():
            return self._collect()

    def _said(self, chunk: Chunk, adapter: int | None) -> Part:
        pages = tuple(chunk.pages[: pages_for(chunk.start + chunk.count)])
        tokens = tuple(chunk.tokens) if self.tokens else ()
        return Part(chunk.start, chunk.count, chunk.samples, pages, tokens, adapter)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """What breaks here breaks this process's part for good: as a follower's, it is as if it had died."""
        try:
            yield
        except SllmError:
            raise
        except Exception as error:
            log.exception("what computes %s failed", self._layers)
            text = f"what computes {self._layers} failed: {type(error).__name__}: {error}"
            raise InternalError(text) from error

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except SllmError as error:
            first = self._cause(error) if isinstance(error, InstanceLost) else error
            self._lost = first if isinstance(first, InstanceLost) else InstanceLost(first.message)
            self.close()
            raise first from error
        except BaseException:
            self.close()
            raise
