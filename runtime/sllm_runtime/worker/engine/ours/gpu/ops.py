"""What a step computes on an accelerator, apart from who computes it.

All tensors of one call are on one device. Nothing here waits for that device or depends on a value that lies on it:
so a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch

Tensor = torch.Tensor


class Ops(Protocol):
    """The operations of a decoder on a GPU. In exact ones a row's bits depend on that row alone: not on the other rows,
    their number or its place."""

    @property
    def name(self) -> str:
        """Part of the numerics fingerprint."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What they raise where they cannot be computed: by a compiler or a processor that does not take a kernel."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``x`` (rows, in) times ``weight`` (out, in), plus ``bias`` (out): (rows, out) of the dtype of ``x``,
        accumulated in float32."""

    def linear_added(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """``residual`` (rows, out) plus that product."""

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * ``scale`` over the last dim of ``x`` (..., width), in float32, of the dtype of
        ``x``. ``scale``: float32 (width)."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """With mean and bias over the last dim of ``x`` (..., width), in float32, of the dtype of ``x``."""

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """Put ``k`` and ``v`` (rows, kv, width) where ``slots`` (rows, int64: page * PAGE + offset) say. ``k_pages``
        and ``v_pages``: (pages, kv, PAGE, width)."""

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, of: Tensor, positions: Tensor,
        scale: float, window: int, cap: float,
    ) -> Tensor:  # fmt: skip
        """What the rows ``q`` (rows, queries, width) see: (rows, queries, width).

        ``tables`` int32 (sequences, most pages): pages from position 0 on; ``of`` int32 (rows): whose table;
        ``positions`` int64 (rows): a row sees places up to its own, with a ``window`` (0: none) those above position -
        window alone. ``scale`` of the scores; ``cap``: they are bent below it by tanh (0: they are not).
        """
