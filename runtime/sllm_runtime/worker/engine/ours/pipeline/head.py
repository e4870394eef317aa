"""The head of a pipeline: it has the first layers, embedding and output head, and drives the stages behind it.

The rows that tokens are chosen from come back to it, so everything a request is (tokens, sampling, stop ids) stays in
one process, and a tied head is there once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Final

import torch

from sllm_runtime.protocol.errors import InstanceLost, InvalidRequest, ProtocolError, SllmError
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.stages import Hello, LayerRange, Part, Sleep, Step, Wake
from sllm_runtime.worker.engine.ours.batch import Batches, decodes_first
from sllm_runtime.worker.engine.ours.kv import KvShape, KvStore
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pages import pages_for
from sllm_runtime.worker.engine.ours.pipeline.edge import Edges
from sllm_runtime.worker.engine.ours.pipeline.stage import dtype_name
from sllm_runtime.worker.engine.ours.runner import sampled
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Limits, Sequence

_CAUSE_S: Final = 1.0
"""How long a lost stage's neighbours have to say what happened."""


class Pipeline:
    """A ``Runner``: layers ``[0, high)`` here, the others in the stages on ``edges``, which it owns.

    ``depth``: steps on their way at once; as many as stages keep all of them busy. The constructor returns when every
    stage has said hello. Raises ``InstanceLost`` if one does not in time, or what a stage refuses the pipeline for.
    """

    kv: KvStore | None = None
    """No process has all of it."""

    def __init__(
        self,
        decoder: Decoder,
        numerics: Numerics,
        high: int,
        edges: Edges,
        *,
        depth: int,
        kv_bytes: int,
        fingerprint: str,
        limits: Limits | None = None,
    ) -> None:
        if not 0 < high < decoder.count:
            raise InvalidRequest(f"layers 0 to {high} of {decoder.count} leave none for a stage behind", field="layers")
        limits = limits or Limits()
        self.depth = depth
        self._decoder = decoder
        self._numerics = numerics
        self._high = high
        self._edges = edges
        self._shape = KvShape(high, decoder.heads.kv, decoder.heads.width)
        self._batches: Batches | None = None
        self._store: KvStore | None = None
        self._launched = 0
        self._steps: deque[tuple[int, int]] = deque()
        """Number of each step on its way, and how many rows come back."""
        self._lost: SllmError | None = None
        hello = Hello(
            fingerprint=fingerprint,
            level=numerics.name,
            dtype=dtype_name(decoder.dtype),
            hidden=decoder.hidden,
            rows=numerics.padded(limits.prefill + limits.running),
            slots=depth,
            layers=(LayerRange(0, high),),
            pages=kv_bytes // self._shape.page_bytes,
            shared=edges.shared,
        )
        try:
            edges.open(hello)
            self._whole = self._closed(edges.accept(edges.patience_s))
        except BaseException:
            edges.close()
            raise

    @property
    def stages(self) -> tuple[LayerRange, ...]:
        """The head's layers and those of each stage behind it."""
        return self._whole.layers

    def close(self) -> None:
        """The stages end too. Repeatable."""
        self._lost = self._lost or InstanceLost("the pipeline is closed")
        self._edges.close()

    def room(self, kv_bytes: int) -> int:
        """See ``Runner.room``: that of the stage that has the least."""
        return min(kv_bytes // self._shape.page_bytes, self._whole.pages)

    def wake(self, pages: int) -> None:
        """See ``Runner.wake``."""
        self._store = KvStore(self._shape, pages)
        self._batches = Batches(self._store, self._decoder.heads, self._numerics)
        with self._failing():
            self._edges.send(Wake(pages))

    def sleep(self) -> None:
        """See ``Runner.sleep``. Steps on their way are computed before."""
        self._store = self._batches = None
        with self._failing():
            self._edges.send(Sleep())

    def launch(self, chunks: Many[Chunk], fresh: Many[int]) -> tuple[Sequence, ...]:
        """See ``Runner.launch``; computes the head's layers."""
        assert self._store is not None
        assert self._batches is not None
        number, self._launched = self._launched, self._launched + 1
        with self._failing(), torch.inference_mode():
            self._edges.send(Step(number, tuple(map(_part, decodes_first(chunks))), tuple(fresh)))
            for page in fresh:
                self._store.clear(page)
            batch = self._batches.make(chunks)
            rows = self._decoder.run(self._decoder.begin(batch), batch, 0, self._high)
            self._edges.send_rows(number, rows)
        self._steps.append((number, len(batch.wanted)))
        return sampled(chunks)

    def collect(self) -> torch.Tensor | None:
        """See ``Runner.collect``."""
        number, count = self._steps.popleft()
        with self._failing(), torch.inference_mode():
            rows = self._edges.receive_rows(number, count)
            return self._decoder.logits(rows, torch.arange(count)) if count else None

    def _closed(self, hello: Hello) -> Hello:
        """The hello that came round, if its stages have every layer. Raises ``ProtocolError``."""
        if hello.version not in (PROTOCOL_VERSION, PROTOCOL_VERSION - 1):
            raise ProtocolError(f"a stage speaks version {hello.version}, the head {PROTOCOL_VERSION}")
        borders = [each.high for each in hello.layers]
        if borders[:1] != [self._high] or [each.low for each in hello.layers] != [0, *borders[:-1]]:
            raise ProtocolError(f"stages of {', '.join(map(str, hello.layers))} do not follow one another")
        if len(borders) < 2 or borders[-1] != self._decoder.count:
            raise ProtocolError(f"stages up to layer {borders[-1]} of {self._decoder.count} are not all")
        self._edges.before = f"the stage of {hello.layers[-1]}"
        self._edges.behind = f"the stage of {hello.layers[1]}"
        return hello

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What breaks inside ends the pipeline; why is raised, then and ever after."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except SllmError as error:
            self._lost = self._cause(error)
            self.close()
            raise self._lost from error
        except BaseException:
            self.close()
            raise

    def _cause(self, error: SllmError) -> SllmError:
        """What the stages say, if ``error`` is that one of them is gone: the one behind it knows which and why."""
        if not isinstance(error, InstanceLost) or self._edges.told:
            return error
        try:
            while True:
                self._edges.receive(_CAUSE_S)
        except SllmError as told:
            return told


def _part(chunk: Chunk) -> Part:
    end = chunk.start + chunk.count
    return Part(chunk.start, chunk.count, chunk.samples, tuple(chunk.pages[: pages_for(end)]))
