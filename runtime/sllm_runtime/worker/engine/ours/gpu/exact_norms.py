"""Norms of rows, one program for each: a row's sums have the order that its width gives them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sllm_runtime.worker.engine.ours.gpu.exact_memory import aligned


@triton.jit
def rms_kernel(
    x: tl.tensor, scale: tl.tensor, out: tl.tensor, eps: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    """A whole row is held by one program."""
    at = tl.arange(0, BLOCK)
    here = at < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + at
    wide = tl.load(x + row, mask=here, other=0.0).to(tl.float32)
    size = tl.sum(wide * wide, 0) / WIDTH
    result = wide * tl.rsqrt(size + eps) * tl.load(scale + at, mask=here, other=0.0)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=here)


@triton.jit
def layer_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """A whole row is held by one program."""
    at = tl.arange(0, BLOCK)
    here = at < WIDTH
    row = tl.program_id(0).to(tl.int64) * WIDTH + at
    wide = tl.load(x + row, mask=here, other=0.0).to(tl.float32)
    wide = tl.where(here, wide - tl.sum(wide, 0) / WIDTH, 0.0)
    size = tl.sum(wide * wide, 0) / WIDTH
    result = wide * tl.rsqrt(size + eps) * tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
    result += tl.load(bias + at, mask=here, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=here)


def _shape(width: int) -> dict[str, int]:
    """How a row of that width is computed."""
    block = triton.next_power_of_2(width)
    return {"WIDTH": width, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}


def rms_norm(x: torch.Tensor, scale: torch.Tensor, eps: float) -> torch.Tensor:
    """Of ``x`` (..., width), in float32; ``scale``: float32 (width)."""
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel():
        rms_kernel[(x.numel() // x.shape[-1],)](x, scale, out, eps, **_shape(x.shape[-1]))
    return out


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Of ``x`` (..., width), in float32, with mean and bias."""
    x = aligned(x)
    out = torch.empty_like(x)
    if x.numel():
        layer_kernel[(x.numel() // x.shape[-1],)](x, weight, bias, out, eps, **_shape(x.shape[-1]))
    return out
