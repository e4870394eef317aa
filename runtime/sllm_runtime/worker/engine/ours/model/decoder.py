"""A decoder: embedding, layers, final norm, head; any range of its layers is a stage.

A layer is built when it first runs, after its block of weights has arrived: the first prefill runs block by block
while the model loads (execute-while-load, λScale section 4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.batch import Batch, Turn
from sllm_runtime.worker.engine.ours.lora import Lora
from sllm_runtime.worker.engine.ours.model.backend import Backend, Linear, Mlp, Norm, Projection, Rows
from sllm_runtime.worker.engine.ours.model.host import Host
from sllm_runtime.worker.engine.ours.model.rope import Rope

Turns = Mapping[Rope, Turn]
Embed = Callable[[torch.Tensor, torch.Tensor], Rows]


@dataclass(slots=True)
class Attention:
    """Projections around attention. ``order``: places of the heads where they are not q, k, v one after the other."""

    heads: Heads
    qkv: Projection
    out: Linear
    look: Look
    rope: Rope | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    order: torch.Tensor | None = None

    def mix(self, x: Rows, layer: int, batch: Batch, turns: Turns) -> Rows:
        """What each row sees, before ``out``, maybe in float32; writes the rows' K and V into the cache of the stage's
        ``layer``."""
        heads, rows = self.heads, x.shape[0]
        both = heads.queries + heads.kv
        qkv = self.qkv.wide(x).view(rows, both + heads.kv, heads.width)
        if self.order is not None:
            qkv = qkv.index_select(1, self.order)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(qkv[:, : heads.queries]), self.k_norm(qkv[:, heads.queries : both])
            qkv = torch.cat((q, k, qkv[:, both:]), 1)
        turn = None if self.rope is None else turns[self.rope]
        return batch.view.see(layer, qkv, self.look, turn)


@dataclass(slots=True)
class Layer:
    """One layer. ``parallel``: attention and MLP both read the layer's input."""

    attention: Attention
    mlp: Mlp
    before_attention: Norm | None
    before_mlp: Norm | None
    after_attention: Norm | None = None
    after_mlp: Norm | None = None
    parallel: bool = False
    norm_last: bool = False
    """The norms stand behind the residual sums (OPT-350m)."""

    def __call__(self, x: Rows, layer: int, batch: Batch, turns: Turns) -> Rows:
        if self.norm_last:
            return self._norm_last(x, layer, batch, turns)
        into = x if self.before_attention is None else self.before_attention(x)
        mixed = self.attention.mix(into, layer, batch, turns)
        source = x
        if self.after_attention is None:
            x = self.attention.out.added(mixed, x)
        else:
            x = x + self.after_attention(self.attention.out(mixed))
        if self.parallel:
            into = into if self.before_mlp is None else self.before_mlp(source)
        else:
            into = x if self.before_mlp is None else self.before_mlp(x)
        if self.after_mlp is None:
            return self.mlp.added(into, x)
        return x + self.after_mlp(self.mlp(into))

    def _norm_last(self, x: Rows, layer: int, batch: Batch, turns: Turns) -> Rows:
        assert self.before_attention is not None
        assert self.before_mlp is not None
        x = self.before_attention(self.attention.out.added(self.attention.mix(x, layer, batch, turns), x))
        return self.before_mlp(self.mlp.added(x, x))


class Arrival(Protocol):
    """Weights on their way. ``layer``: its number; -1: what stands before the layers, the count of layers: behind."""

    def wait(self, layer: int) -> None:
        """Until the tensors of ``layer`` are there. Raises what made them fail, or ``DeadlineExceeded``."""


class Here:
    """Stands for weights that are all in memory: ``wait`` returns at once."""

    def wait(self, layer: int) -> None:
        """At once."""


@dataclass(slots=True, kw_only=True)
class Decoder:
    """A family's model; parts are made by the functions when their weights are there."""

    count: int
    """Layers of the whole model."""
    hidden: int
    """Numbers of a hidden row."""
    heads: Heads
    vocabulary: int
    context: int
    dtype: torch.dtype
    start: Callable[[], Embed]
    """Makes what turns ids and positions (rows) into hidden rows."""
    layer: Callable[[int], Layer]
    finish: Callable[[], Callable[[Rows], Rows]]
    """Makes what turns the last hidden rows into logits."""
    ropes: Sequence[Rope] = ()
    lora: Lora = field(default_factory=lambda: Lora({}))
    """Its adapters."""
    backend: Backend = field(default_factory=Host)
    """Where it is computed."""
    arrival: Arrival = field(default_factory=Here)
    _layers: dict[int, Layer] = field(default_factory=dict)
    _last: Callable[[Rows], Rows] | None = None
    _first: Embed | None = None

    def begin(self, batch: Batch) -> Rows:
        """Hidden rows before the first layer."""
        self.backend.use(batch.numerics, self.dtype)
        if self._first is None:
            self.arrival.wait(-1)
            self._first = self.start()
        return self._first(batch.tokens, batch.positions)

    def run(self, x: Rows, batch: Batch, low: int, high: int) -> Rows:
        """Through the layers ``[low, high)``: a stage. The batch's KV holds those layers alone."""
        self.backend.use(batch.numerics, self.dtype)
        turns = {rope: rope.turn(batch.positions) for rope in self.ropes}
        with np.errstate(all="ignore"):  # a NaN is found where its row's token is chosen
            for number in range(low, high):
                part = self._layers.get(number)
                if part is None:
                    self.arrival.wait(number)
                    part = self._layers[number] = self.layer(number)
                x = part(x, number - low, batch, turns)
        return x

    def logits(self, x: Rows, wanted: torch.Tensor) -> torch.Tensor:
        """Float32 logits (wanted, vocabulary) of the rows ``wanted``."""
        if self._last is None:
            self.arrival.wait(self.count)
            self._last = self.finish()
        with np.errstate(all="ignore"):
            found = self._last(x.index_select(0, wanted))
            return found.to(torch.float32, memory_format=torch.contiguous_format)
