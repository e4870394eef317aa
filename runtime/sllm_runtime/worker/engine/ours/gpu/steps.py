"""Steps on an accelerator: their rows, and how these see the pages."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch

from sllm_runtime.worker.engine.ours.attention import Heads, Look
from sllm_runtime.worker.engine.ours.batch import Batch, Part, Turn, decodes_first
from sllm_runtime.worker.engine.ours.gpu.kv import DeviceKv
from sllm_runtime.worker.engine.ours.gpu.layout import Fields, Layout, fill, layout_of
from sllm_runtime.worker.engine.ours.gpu.ops import Ops
from sllm_runtime.worker.engine.ours.numerics import Numerics


@dataclass(frozen=True, slots=True)
class PagedView:
    """See ``batch.View``."""

    kv: DeviceKv
    heads: Heads
    ops: Ops
    at: Fields

    def see(self, layer: int, qkv: torch.Tensor, look: Look, turn: Turn | None) -> torch.Tensor:
        """See ``View.see``; of the cache's dtype."""
        queries, both = self.heads.queries, self.heads.queries + self.heads.kv
        if turn is not None:
            _turn(qkv[:, :both], turn)
        keys, values = self.kv.layer(layer)
        qkv = qkv.to(keys.dtype)
        self.ops.write_kv(qkv[:, queries:both], qkv[:, both:], keys, values, self.at.slots)
        seen = self.ops.attend(
            qkv[:, :queries], keys, values, self.at.tables, self.at.of, self.at.positions,
            look.scale, look.window, look.cap,
        )  # fmt: skip
        return seen.reshape(len(seen), -1)


class DeviceSteps:
    """See ``Steps``."""

    def __init__(self, kv: DeviceKv, heads: Heads, numerics: Numerics, ops: Ops, device: torch.device) -> None:
        self.device = device
        self._kv = kv
        self._heads = heads
        self._numerics = numerics
        self._ops = ops

    def make(self, chunks: Many[Part]) -> Batch:
        """See ``Steps.make``."""
        ordered = decodes_first(chunks)
        layout = layout_of(ordered)
        return self.batch(layout.fields(self.packed(layout, ordered).to(self.device, non_blocking=True)))

    def packed(self, layout: Layout, ordered: Many[Part]) -> torch.Tensor:
        """A step's numbers in memory that a device copies from while this process goes on."""
        buffer = torch.empty(layout.words, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        fill(layout.fields(buffer), ordered, self._kv.pages)
        return buffer

    def batch(self, at: Fields) -> Batch:
        """The step whose numbers are ``at``, on the device."""
        return Batch(
            at.tokens, at.positions, PagedView(self._kv, self._heads, self._ops, at), at.wanted, self._numerics
        )


def _turn(heads: torch.Tensor, turn: Turn) -> None:
    half = turn.half
    swapped = torch.cat((heads[..., half : 2 * half], heads[..., :half], heads[..., 2 * half :]), -1)
    heads.mul_(turn.cos).addcmul_(swapped, turn.sin)
