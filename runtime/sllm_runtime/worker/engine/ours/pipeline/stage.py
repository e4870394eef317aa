"""A stage behind the head: rows come from the stage before, and go on to the one behind."""

from __future__ import annotations

import os
from collections.abc import Set as Names

import msgspec

from sllm_runtime.protocol.errors import ProtocolError, StartFailed
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.stages import Hello, LayerRange, Lend, OnEdge, Step
from sllm_runtime.worker.engine.ours.batch import Batch
from sllm_runtime.worker.engine.ours.edge import Edges, dtype_name
from sllm_runtime.worker.engine.ours.follower import Follower, check_version, level
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.pipeline.lending import Borrowed


class Stage(Follower):
    """Layers ``[low, high)`` of ``decoder``. ``fingerprint``: of this process's numerics (``selftest.fingerprint``),
    which the head's must equal. ``names``: of the tensors of these layers, for adapters; ``None``: it runs none."""

    def __init__(
        self, decoder: Decoder, low: int, high: int, edges: Edges, *, kv_bytes: int, fingerprint: str,
        names: Names[str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(decoder, LayerRange(low, high), edges, kv_bytes)
        self._fingerprint = fingerprint
        self._lends = names is not None and edges.shared
        self._adapters = Borrowed(decoder.lora, names or frozenset())
        self._last = high == decoder.count

    def _open(self) -> tuple[Numerics, int]:
        hello = self._edges.accept(self._edges.patience_s)
        if hello.layers:
            self._edges.before = f"the stage of {hello.layers[-1]}"
        self._check(hello)
        mine = msgspec.structs.replace(
            hello,
            version=PROTOCOL_VERSION,
            layers=(*hello.layers, self._layers),
            pages=min(hello.pages, self._room),
            shared=self._edges.shared,
            lends=hello.lends and self._lends,
        )
        self._edges.open(mine)
        return level(hello.level), hello.rows

    def _check(self, hello: Hello) -> None:
        """Raise what keeps this stage from going on where the one before ends."""
        check_version(hello.version, self._edges.before)
        mine = (self._decoder.hidden, dtype_name(self._decoder.dtype))
        if (hello.hidden, hello.dtype) != mine:
            raise ProtocolError(f"rows are {hello.hidden} numbers of {hello.dtype}, {self._layers} take {mine}")
        if not hello.layers or hello.layers[-1].high != self._layers.low:
            raise ProtocolError(f"{self._edges.before} comes before a stage of {self._layers}")
        if hello.fingerprint != self._fingerprint:
            raise StartFailed(
                f"the stage of {self._layers} would compute other bits than {self._edges.before}: libraries, "
                "processor, threads or weights differ; place the stages on nodes that are alike"
            )

    def _pass_on(self, message: OnEdge) -> None:
        if not self._last:
            self._edges.send(message)

    def _lend(self, message: Lend) -> None:
        if not self._lends:
            super()._lend(message)
        fd = self._edges.descriptor() if message.table else None
        try:
            if not self._last:
                self._edges.send(message, () if fd is None else (fd,))
            self._adapters.take(message, fd)
        finally:
            if fd is not None:
                os.close(fd)

    def _run(self, step: Step, batch: Batch) -> None:
        self._adapters.begin(step)
        rows = self._edges.receive_rows(step.number, batch.rows)
        backend = self._decoder.backend
        with backend.current():
            rows = self._decoder.run(rows.to(backend.device), batch, self._layers.low, self._layers.high)
            self._edges.send_rows(step.number, rows.index_select(0, batch.wanted) if self._last else rows)
