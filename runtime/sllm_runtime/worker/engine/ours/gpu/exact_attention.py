"""Attention over pages in which a row sees nothing of its batch, as Triton kernels.

One program computes a row of one KV head, for up to 16 of its query heads. It goes through the row's pages in order and
keeps maximum, sum and result (online softmax), in tiles that the head's width gives. There is no split over the pages,
and a row of a prefill is computed as a decode row is. So a row's bits follow from its query, its position and the K and
V of its places, whatever the numbers of its pages are.

Which tiles are visited follows from the row's position too. Those left out would change no bit: all of their scores are
-inf, their weights exp(-inf) = 0, and a maximum that stays multiplies sum and result by exp(0) = 1. (Before the first
place of a window sum and result are 0 and stay so.)
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from sllm_runtime.worker.engine.ours.pages import PAGE

_HEADS: Final = 16
"""Query heads of a program: what a tensor core multiplies at least. Those that a group lacks are zeros."""


def tile_of(width: int, dtype: torch.dtype) -> int:
    """Places that are looked at together, a part of a page: K and V of them fit a processor's shared memory."""
    if dtype == torch.float32:
        return 32
    return PAGE if width <= 128 else PAGE // 2


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kernel(
    k: tl.tensor, v: tl.tensor, k_pages: tl.tensor, v_pages: tl.tensor, slots: tl.tensor,
    K_STRIDE: tl.constexpr, V_STRIDE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr,
) -> None:  # fmt: skip
    """One row of one head."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    here = at < WIDTH
    slot = tl.load(slots + row)
    into = ((slot // PAGE * HEADS + head) * PAGE + slot % PAGE) * WIDTH + at
    found = tl.load(k + row * K_STRIDE + head * WIDTH + at, mask=here)
    tl.store(k_pages + into, found.to(k_pages.dtype.element_ty), mask=here)
    found = tl.load(v + row * V_STRIDE + head * WIDTH + at, mask=here)
    tl.store(v_pages + into, found.to(v_pages.dtype.element_ty), mask=here)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, slots: torch.Tensor
) -> None:
    """Put ``k`` and ``v`` (rows, kv, width) where ``slots`` (rows: page * PAGE + offset) say. Pages: (n, kv, PAGE,
    width), dense."""
    rows, heads, width = k.shape
    if rows:
        k, v = by_rows(k), by_rows(v)
        write_kernel[rows, heads](
            k, v, k_pages, v_pages, slots, K_STRIDE=k.stride(0), V_STRIDE=v.stride(0), HEADS=heads, WIDTH=width,
            BLOCK=triton.next_power_of_2(width), PAGE=PAGE, num_warps=1,
        )  # fmt: skip


def by_rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` (rows, heads, width), or a copy, whose rows are dense each: parts of one projection are that already."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


@triton.jit
def bend(score: tl.tensor, CAP: tl.constexpr) -> tl.tensor:
    """cap * tanh(score / cap), by an exp that cannot overflow."""
    small = tl.exp(-2.0 * tl.abs(score) / CAP)
    bent = CAP * (1.0 - small) / (1.0 + small)
    return tl.where(score < 0, -bent, bent)


@triton.jit(do_not_specialize=["most"], do_not_specialize_on_alignment=["q", "tables", "of", "positions"])
def attend_kernel(
    q: tl.tensor, k_pages: tl.tensor, v_pages: tl.tensor, tables: tl.tensor, of: tl.tensor,
    positions: tl.tensor, out: tl.tensor, most: tl.tensor,
    Q_STRIDE: tl.constexpr, SCALE: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    KV: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, PAGE: tl.constexpr,
) -> None:  # fmt: skip
    """One row of one KV head, of ``HEADS`` of its query heads."""
    row, kv = tl.program_id(0).to(tl.int64), tl.program_id(1)
    member = tl.program_id(2) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, BLOCK)
    has_lane = lane < WIDTH
    mine = (kv * GROUP + member)[:, None] * WIDTH + lane[None, :]
    wanted = (member < GROUP)[:, None] & has_lane[None, :]
    query = tl.load(q + row * Q_STRIDE + mine, mask=wanted, other=0.0).to(k_pages.dtype.element_ty)
    here = tl.load(positions + row).to(tl.int32)
    table = tables + tl.load(of + row).to(tl.int64) * most
    top = tl.full((HEADS,), float("-inf"), tl.float32)
    size = tl.zeros((HEADS,), tl.float32)
    seen = tl.zeros((HEADS, BLOCK), tl.float32)
    # Every tile of these has a place that the row sees, so the maximum is finite from the first on.
    first = tl.maximum(here - WINDOW + 1, 0) // TILE if WINDOW else 0
    for tile in range(first, here // TILE + 1):
        place = tile * TILE + tl.arange(0, TILE)
        visible = place <= here
        if WINDOW:
            visible = visible & (place > here - WINDOW)
        page = tl.load(table + tile * TILE // PAGE).to(tl.int64)
        at = ((page * KV + kv) * PAGE + place % PAGE) * WIDTH
        # What another sequence left behind the row's last place is not read: 0 x NaN would be NaN.
        key = tl.load(k_pages + at[None, :] + lane[:, None], mask=visible[None, :] & has_lane[:, None], other=0.0)
        score = tl.dot(query, key, input_precision="ieee") * SCALE
        if CAP > 0:
            score = bend(score, CAP)
        score = tl.where(visible[None, :], score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        weight = tl.exp(score - higher[:, None])
        keep = tl.exp(top - higher)
        value = tl.load(v_pages + at[:, None] + lane[None, :], mask=visible[:, None] & has_lane[None, :], other=0.0)
        size = size * keep + tl.sum(weight, 1)
        seen = tl.dot(weight.to(value.dtype), value, seen * keep[:, None], input_precision="ieee")
        top = higher
    tl.store(out + row * KV * GROUP * WIDTH + mine, (seen / size[:, None]).to(out.dtype.element_ty), mask=wanted)


def attend(
    q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tables: torch.Tensor, of: torch.Tensor,
    positions: torch.Tensor, scale: float, window: int, cap: float,
) -> torch.Tensor:  # fmt: skip
    """See ``Ops.attend``. Products are of the pages' dtype, summed in float32; pages and tables are dense."""
    rows, queries, width = q.shape
    kv = k_pages.shape[1]
    group = queries // kv
    q = by_rows(q)
    out = q.new_empty(q.shape)
    if rows:
        attend_kernel[rows, kv, triton.cdiv(group, _HEADS)](
            q, k_pages, v_pages, tables, of, positions, out, tables.shape[1],
            Q_STRIDE=q.stride(0), SCALE=scale, WINDOW=window, CAP=cap, KV=kv, GROUP=group, WIDTH=width,
            BLOCK=max(triton.next_power_of_2(width), _HEADS), HEADS=_HEADS, TILE=tile_of(width, k_pages.dtype),
            PAGE=PAGE, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out
