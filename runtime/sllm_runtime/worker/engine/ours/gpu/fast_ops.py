"""The arithmetic of the fast mode: what torch has. A row's last bits depend on its batch."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional as F

from sllm_runtime.worker.engine.ours.gpu.fast import FastAttention
from sllm_runtime.worker.engine.ours.gpu.ops import Tensor
from sllm_runtime.worker.engine.ours.pages import PAGE


class FastOps(FastAttention):
    """See ``Ops``; ``attend`` is ``FastAttention``'s."""

    name: Final = "fast-torch"
    refusals: Final = ()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Ops.linear``."""
        return F.linear(x, weight, bias)

    def linear_added(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Ops.linear_added``."""
        return torch.addmm(residual if bias is None else residual + bias, x, weight.t())

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return F.rms_norm(x.to(torch.float32), (x.shape[-1],), scale, eps).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See ``Ops.layer_norm``; torch's own is in float32 inside."""
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """See ``Ops.write_kv``.

        What is not finite in V becomes so: attention weighs what a row does not see with 0, and 0 x NaN would reach
        rows of other sequences. Those that do see it are NaN by its K.
        """
        at = (slots // PAGE, slots % PAGE)
        for rows, pages in ((k, k_pages), (v.nan_to_num(), v_pages)):
            pages.transpose(1, 2).index_put_(at, rows.to(pages.dtype))
