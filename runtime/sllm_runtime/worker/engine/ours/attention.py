"""Attention over pages, the same arithmetic for a decode row and for any row of a prefill.

Scores are products of (a page's queries) x (a page's keys): a batch of pages, in physical order where the pages in use
lie close together, so that K and V are not copied. A page that several sequences share is multiplied once with the
queries of all. Softmax goes over a row's pages in float32, and the pages' parts of P.V are added in order. More pages
than a row needs change none of its bits: their scores are -inf and their parts are zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sllm_runtime.protocol.checkpoint import align
from sllm_runtime.worker.engine.ours.pages import PAGE


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, width of each."""

    queries: int
    kv: int
    width: int

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.queries // self.kv


@dataclass(frozen=True, slots=True)
class Plan:
    """How rows meet pages; indexes into flat rows. ``n`` pages, ``m`` queries for each page and KV head."""

    n: int
    m: int
    span: int
    """Pages of the longest row."""
    pages: slice | torch.Tensor
    to_pages: torch.Tensor
    """(n * kv * m) row of qkv (rows * (queries + 2 * kv)) that stands there."""
    to_rows: torch.Tensor
    """(rows * heads * span) row of the pages' scores that belongs there."""
    back: torch.Tensor
    """(n * kv * m) row of the probabilities (rows * heads * span) that stands there."""
    parts: torch.Tensor
    """(span * rows_out * heads) row of the pages' parts, the last one (zeros) where a row has no such page."""


def plan(tables: Sequence[Sequence[int]], heads: Heads, tile: int, first: int, pad: int) -> Plan:
    """For rows whose pages are ``tables``, the first of them row ``first`` of q; ``pad`` rows of zeros follow."""
    rows, span = len(tables), max(map(len, tables))
    table = np.array([[*each, *[each[-1]] * (span - len(each))] for each in tables], dtype=np.int64)
    valid = np.arange(span) < np.array([[len(each)] for each in tables])
    used, _ = np.unique(table, return_counts=True)  # without counts it imports numpy.ma: 18 ms of a cold first token
    low, n = int(used[0]), int(used[-1] - used[0]) + 1
    dense = n <= 2 * len(used) + 2
    local = table - low if dense else np.searchsorted(used, table)
    n = n if dense else len(used)
    slot = np.where(valid, _ranks(local, valid, n), 0)
    slot = np.where(valid, slot, slot[np.arange(rows)[:, None], valid.sum(1, keepdims=True) - 1])
    group, kv = heads.group, heads.kv
    m = align((int(slot.max()) + 1) * group, tile)
    # Axes: row, page of the row, KV head, query head of its group.
    at = (local[:, :, None, None] * kv + np.arange(kv)[:, None]) * m + slot[:, :, None, None] * group + np.arange(group)
    head = np.arange(kv)[:, None] * group + np.arange(group)
    row = np.arange(rows)[:, None, None, None]
    width = heads.queries + 2 * kv
    source = np.broadcast_to((first + row) * width + head, at.shape)
    result = np.broadcast_to(row * heads.queries + head, at.shape) * span
    page = np.arange(span)[None, :, None, None]
    to_pages = np.full(n * kv * m, first * width, dtype=np.int64)
    back = np.zeros(n * kv * m, dtype=np.int64)
    to_pages[at[valid]] = source[valid]
    back[at[valid]] = (result + page)[valid]
    parts = np.full((span, rows + pad, kv, group), n * kv * m, dtype=np.int64)
    parts[:, :rows] = np.where(valid[:, :, None, None], at, n * kv * m).transpose(1, 0, 2, 3)
    return Plan(
        n, m, span,
        slice(low, low + n) if dense else torch.from_numpy(used),
        torch.from_numpy(to_pages),
        torch.from_numpy(np.ascontiguousarray(at.transpose(0, 2, 3, 1)).reshape(-1)),
        torch.from_numpy(back),
        torch.from_numpy(parts.reshape(-1)),
    )  # fmt: skip


def _ranks(local: np.ndarray, valid: np.ndarray, n: int) -> np.ndarray:
    """For each (row, page): how many rows before it have the same page."""
    hot = np.zeros((local.shape[0], n), dtype=np.int64)
    np.put_along_axis(hot, local, 1, axis=1)
    before = np.cumsum(hot, axis=0) - hot
    return np.where(valid, np.take_along_axis(before, local, axis=1), 0)


@dataclass(slots=True)
class Group:
    """Rows of one step that go through attention together, with buffers that its layers share."""

    plan: Plan
    heads: Heads
    positions: torch.Tensor
    """(rows) of each row."""
    masks: dict[int, torch.Tensor]
    """By window (0: none), float32 (rows, 1, span * PAGE)."""
    buffer: torch.Tensor
    """(n * kv * m + 1, width), the last row zero."""

    @classmethod
    def of(cls, plan: Plan, heads: Heads, positions: torch.Tensor) -> Group:
        """A step's group."""
        buffer = torch.empty(plan.n * heads.kv * plan.m + 1, heads.width)
        buffer[-1] = 0
        return cls(plan, heads, positions, {}, buffer)

    def mask(self, window: int) -> torch.Tensor:
        """0 where a row may look, -inf elsewhere."""
        found = self.masks.get(window)
        if found is None:
            places = torch.arange(self.plan.span * PAGE)
            here = self.positions.unsqueeze(1)
            hidden = places > here
            if window:
                hidden |= places <= here - window
            found = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf")).unsqueeze(1)
            self.masks[window] = found
        return found


def attend(
    qkv: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, scale: float, window: int, cap: float
) -> torch.Tensor:
    """``qkv`` (rows * (queries + 2 * kv), width) as projected; ``k`` and ``v`` (pages, kv, PAGE, width); all float32.
    Gives (rows_out * queries, width). ``cap``: scores are bent below it by tanh."""
    here, heads = group.plan, group.heads
    if isinstance(here.pages, slice):
        k, v = k[here.pages], v[here.pages]
    else:
        k, v = k.index_select(0, here.pages), v.index_select(0, here.pages)
    batch = here.n * heads.kv
    queries = qkv.index_select(0, here.to_pages).view(batch, here.m, heads.width)
    scores = torch.bmm(queries, k.view(batch, PAGE, heads.width).transpose(1, 2))
    scores = scores.view(-1, PAGE).index_select(0, here.to_rows).view(-1, heads.queries, here.span * PAGE)
    if cap:
        scores, scale = scores.mul_(scale / cap).tanh_(), cap
    weights = torch.softmax(torch.add(group.mask(window), scores, alpha=scale), -1)
    weights = weights.view(-1, PAGE).index_select(0, here.back).view(batch, here.m, PAGE)
    torch.bmm(weights, v.view(batch, PAGE, heads.width), out=group.buffer[:-1].view(batch, here.m, heads.width))
    if here.span == 1:
        return group.buffer.index_select(0, here.parts)
    parts = group.buffer.index_select(0, here.parts).view(here.span, -1, heads.width)
    total = parts[0]
    for part in parts[1:]:
        total += part
    return total
