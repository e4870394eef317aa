"""The head of a pipeline: it has the first layers, embedding and output head, and drives the stages behind it.

The rows that tokens are chosen from come back to it, so everything a request is (tokens, sampling, stop ids) stays in
one process, and a tied head is there once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence as Many
from collections.abc import Set as Names

import torch

from sllm_runtime.protocol.errors import InstanceLost, InvalidRequest, ProtocolError, SllmError
from sllm_runtime.protocol.stages import Hello, LayerRange, OnEdge
from sllm_runtime.worker.engine.ours.batch import Batch
from sllm_runtime.worker.engine.ours.driver import CAUSE_S, Driver
from sllm_runtime.worker.engine.ours.edge import Edges, dtype_name
from sllm_runtime.worker.engine.ours.follower import check_version
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pipeline.lending import Lender
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Limits


class Pipeline(Driver):
    """Layers ``[0, high)`` here, the others in the stages on ``edges``, which it owns.

    ``depth``: steps on their way at once; as many as stages keep all of them busy. ``names``: of the tensors of its
    layers, for adapters; ``None``: it runs none. The constructor returns when every stage has said hello. Raises
    ``InstanceLost`` if one does not in time, or what a stage refuses the pipeline for.
    """

    layer_ranges = True

    def __init__(
        self, decoder: Decoder, numerics: Numerics, high: int, edges: Edges, *, depth: int, kv_bytes: int,
        fingerprint: str, limits: Limits | None = None, names: Names[str] | None = None,
    ) -> None:  # fmt: skip
        if not 0 < high < decoder.count:
            raise InvalidRequest(f"layers 0 to {high} of {decoder.count} leave none for a stage behind", field="layers")
        super().__init__(decoder, LayerRange(0, high), numerics, depth)
        limits = limits or Limits()
        self._edges = edges
        self._lender = Lender(names or frozenset())
        self._steps: deque[tuple[int, int]] = deque()
        """Number of each step on its way, and how many rows come back."""
        hello = Hello(
            fingerprint=fingerprint,
            level=numerics.name,
            dtype=dtype_name(decoder.dtype),
            hidden=decoder.hidden,
            rows=numerics.padded(limits.prefill + limits.running),
            slots=depth,
            layers=(self._layers,),
            pages=kv_bytes // self._shape.page_bytes,
            shared=edges.shared,
            lends=edges.shared and names is not None,
        )
        with self._failing():
            edges.open(hello)
            whole = edges.accept(edges.patience_s)
            self._check(whole)
            self._settle(whole.pages)
        self.lora = whole.lends
        """Whether every stage takes adapters."""
        self.stages = whole.layers
        """The head's layers and those of each stage behind it."""
        edges.before, edges.behind = (f"the stage of {whole.layers[each]}" for each in (-1, 1))

    def _check(self, hello: Hello) -> None:
        """Raise ``ProtocolError`` unless the stages of the hello that came round have every layer."""
        check_version(hello.version, "a stage")
        borders = [each.high for each in hello.layers]
        if borders[:1] != [self._layers.high] or [each.low for each in hello.layers] != [0, *borders[:-1]]:
            raise ProtocolError(f"stages of {', '.join(map(str, hello.layers))} do not follow one another")
        if len(borders) < 2 or borders[-1] != self._decoder.count:
            raise ProtocolError(f"stages up to layer {borders[-1]} of {self._decoder.count} are not all")

    def _tell(self, message: OnEdge) -> None:
        self._edges.send(message)

    def _lent(self, chunks: Many[Chunk]) -> list[int | None]:
        adapters = [chunk.sequence.adapter for chunk in chunks]
        news = self._lender.news(adapters)
        if news is not None:
            message, fd = news
            try:
                self._edges.send(message, () if fd is None else (fd,))
            finally:
                if fd is not None:
                    os.close(fd)
        return [self._lender.number(each) for each in adapters]

    def _run(self, number: int, batch: Batch) -> None:
        with self._decoder.backend.current():
            rows = self._decoder.run(self._decoder.begin(batch), batch, 0, self._layers.high)
            self._edges.send_rows(number, rows)
        self._steps.append((number, len(batch.wanted)))

    def _collect(self) -> torch.Tensor | None:
        number, count = self._steps.popleft()
        rows = self._edges.receive_rows(number, count)
        if not count:
            return None
        backend = self._decoder.backend
        with backend.current():
            wanted = torch.arange(count, device=backend.device)
            return self._decoder.logits(rows.to(backend.device), wanted).cpu()

    def _cause(self, error: InstanceLost) -> SllmError:
        """The stage behind the one that is gone knows which and why."""
        if self._edges.told:
            return error
        try:
            while True:
                self._edges.receive(min(CAUSE_S, self._edges.patience_s))
        except SllmError as told:
            return told

    def _release(self) -> None:
        self._edges.close()
