"""Decode steps as CUDA graphs: one launch for all kernels of a step, instead of one for each.

A graph reads its step from one buffer and is good for every step of its layout. A layout is captured when it has come
some times, long after the model is there: the first token waits for no capture.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import torch

from sllm_runtime.worker.engine.ours.batch import Batch, Part
from sllm_runtime.worker.engine.ours.gpu.layout import Layout
from sllm_runtime.worker.engine.ours.gpu.parts import DENSE
from sllm_runtime.worker.engine.ours.gpu.steps import DeviceSteps
from sllm_runtime.worker.engine.ours.pages import pages_for

log = logging.getLogger(__name__)
ROWS: Final = (1, 2, 4, *range(8, DENSE + 1, 8))
"""Rows of graphs; a step has the next larger one's. With more, experts ask the device whose rows are theirs."""
AFTER: Final = 3
"""Steps of a layout that run eagerly: kernels are compiled in them."""


class Computed(NamedTuple):
    """Of a step: hidden rows behind the last layer, and float32 logits of the rows that were wanted, if any were, with
    what is ``likeliest`` by them."""

    hidden: torch.Tensor
    logits: torch.Tensor | None
    best: torch.Tensor | None


Compute = Callable[[], Computed]


class Recorder(Protocol):
    """Turns a computation into one that can be repeated."""

    def __call__(self, compute: Compute) -> tuple[Computed, Callable[[], None]]:
        """Where the results are, and what computes them anew from the same memory. Raises ``RuntimeError`` for a
        computation that cannot be recorded."""


class CudaRecorder:
    """CUDA graphs, which share one pool of memory: they run one after the other, and what one of them has computed is
    used before the next runs."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> tuple[Computed, Callable[[], None]]:
        # What a library makes when it is first used must not be made in a capture.
        beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            compute()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # Another thread may bring an adapter meanwhile, and ask for memory: that must not end the capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            computed = compute()
        return computed, graph.replay


def layout_for(parts: Many[Part]) -> Layout | None:
    """That of the graph for a step of ``parts``: decode rows alone, as many as some graph has. None: it runs eagerly.

    Tables are as long as the next power of two, so that a sequence that grows does not soon need another graph.
    """
    rows = next((size for size in ROWS if size >= len(parts)), None)
    if rows is None or not parts or any(part.count != 1 or not part.samples for part in parts):
        return None
    longest = max(pages_for(part.start + 1) for part in parts)
    return Layout(rows, rows, 1 << (longest - 1).bit_length(), rows)


@dataclass(frozen=True, slots=True)
class _Graph:
    layout: Layout
    buffer: torch.Tensor
    computed: Computed
    replay: Callable[[], None]


class Graphs:
    """Those of one KV cache. ``compute``: a step as it is computed eagerly. A computation that cannot be recorded is
    told once, and all steps then run eagerly."""

    def __init__(self, steps: DeviceSteps, compute: Callable[[Batch], Computed], record: Recorder) -> None:
        self._steps = steps
        self._compute = compute
        self._record = record
        self._seen: dict[Layout, int] = {}
        self._graphs: dict[Layout, _Graph] = {}
        self.refused = ""
        """Why steps are not recorded."""

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those that were captured."""
        return tuple(self._graphs)

    def step(self, parts: Many[Part]) -> Computed | None:
        """Compute a step by its graph; None: it has none (yet)."""
        layout = None if self.refused else layout_for(parts)
        if layout is None:
            return None
        graph = self._graphs.get(layout) or self._capture(layout, parts)
        if graph is not None:
            graph.buffer.copy_(self._steps.packed(layout, parts), non_blocking=True)
            graph.replay()
        return None if graph is None else graph.computed

    def _capture(self, layout: Layout, parts: Many[Part]) -> _Graph | None:
        self._seen[layout] = self._seen.get(layout, 0) + 1
        if self._seen[layout] <= AFTER:
            return None
        # The step itself is what is run while it is recorded: it writes its own K and V, and does so again afterwards.
        buffer = self._steps.packed(layout, parts).to(self._steps.device, copy=True)
        batch = self._steps.batch(layout.fields(buffer))
        try:
            computed, replay = self._record(lambda: self._compute(batch))
        except RuntimeError as error:  # torch's own errors, those of CUDA and of memory among them
            self.refused = f"{type(error).__name__}: {error}"
            log.warning("decode steps are not recorded as CUDA graphs and run eagerly from now on: %s", self.refused)
            return None
        made = self._graphs[layout] = _Graph(layout, buffer, computed, replay)
        return made
