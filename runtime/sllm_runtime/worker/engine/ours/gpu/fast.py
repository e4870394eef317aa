"""Attention of the fast mode: torch's flex attention over the pages where they lie.

torch's FlashAttention reads pages too (``torch.nn.attention.varlen``), but only by FlashAttention 3 or 4, which have to
be installed beside torch. Flex attention is compiled for any GPU that Triton knows; how it splits the work depends on
the batch, so the last bits do as well.

To flex attention all pages of all KV heads are one row of keys, which needs no copy: (pages, kv, PAGE, width) is
(pages * kv * PAGE, width). A KV head is an entry of its batch, and a block of keys is one head's part of one page.
Which blocks a block of queries visits, and what a query may see in them, follows from the page tables. K and V of
places that nobody sees have to be finite: their weights are 0, and 0 x NaN is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from sllm_runtime.worker.engine.ours.pages import PAGE

_QUERIES: Final = 128
"""Of a block: what flex attention takes together."""
_NEVER: Final = 2**30
Flex = Callable[..., Any]
Mask = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Sight:
    """What the rows of a step see. Everything is on one device, in shapes that follow from shapes alone."""

    order: torch.Tensor
    """(sequences, pages) int32: place of a page in a sequence's table, -1 where it is not there."""
    of: torch.Tensor
    """(rows) int64: whose table."""
    positions: torch.Tensor
    """(rows) int32."""
    window: int
    kv: int

    @property
    def mask(self) -> Mask:
        """Whether KV head ``head`` of the row ``query`` sees the number ``key`` of all keys."""
        order, of, positions, window, kv = self.order, self.of, self.positions, self.window, self.kv

        def sees(head: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            block = key // PAGE
            turn = order[of[query], block // kv]
            place, here = turn * PAGE + key % PAGE, positions[query]
            seen = (block % kv == head) & (turn >= 0) & (place <= here)
            return seen & (place > here - window) if window else seen

        return sees

    def blocks(self) -> BlockMask:
        """The blocks in which one of a block's rows sees a place, and perhaps some more."""
        rows, (sequences, pages) = len(self.positions), self.order.shape
        count = -(-rows // _QUERIES)
        at = torch.arange(rows, device=self.of.device) // _QUERIES * sequences + self.of
        last = self.positions.new_full((count * sequences,), -1).scatter_reduce_(0, at, self.positions, "amax")
        used = (self.order >= 0) & (self.order * PAGE <= last.view(count, sequences, 1))
        if self.window:
            first = self.positions.new_full((count * sequences,), _NEVER).scatter_reduce_(0, at, self.positions, "amin")
            used &= (self.order + 1) * PAGE > first.view(count, sequences, 1) - self.window + 1
        wanted = used.any(1)
        found = torch.argsort(wanted.to(torch.int8), dim=1, descending=True, stable=True)
        heads = torch.arange(self.kv, device=found.device).view(-1, 1, 1, 1)
        return BlockMask.from_kv_blocks(
            wanted.sum(1).to(torch.int32).expand(self.kv, 1, count).contiguous(),
            (found * self.kv + heads).to(torch.int32),
            BLOCK_SIZE=(_QUERIES, PAGE), mask_mod=self.mask, seq_lengths=(rows, pages * self.kv * PAGE),
            compute_q_blocks=False,
        )  # fmt: skip


def sight_of(
    tables: torch.Tensor, of: torch.Tensor, positions: torch.Tensor, window: int, pages: int, kv: int
) -> Sight:
    """Of rows as in ``Ops.attend``, where there are ``pages`` pages of ``kv`` heads. What stands in a table behind the
    last page that one of its rows needs does not matter."""
    sequences, most = tables.shape
    # What a query sees is computed for each pair of a tile, which a GPU has little room for.
    of, positions = of.to(torch.int64), positions.to(torch.int32)
    turns = torch.arange(most, device=tables.device, dtype=torch.int32)
    last = positions.new_full((sequences,), -1).scatter_reduce_(0, of, positions, "amax")
    needed = turns * PAGE <= last.unsqueeze(1)
    order = positions.new_full((sequences, pages + 1), -1)
    # Not torch.where, which copies a number to the device: a graph that is captured cannot.
    order.scatter_(1, tables.masked_fill(~needed, pages).to(torch.int64), turns.expand(sequences, most))
    return Sight(order[:, :pages], of, positions, window, kv)


def unfused(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, score_mod: Flex | None, block_mask: BlockMask,
    scale: float, enable_gqa: bool, kernel_options: object,
) -> torch.Tensor:  # fmt: skip
    """What ``flex_attention`` computes, by plain operators: all scores are in memory at once. For devices that it is
    not compiled for here, and tests."""
    heads, _, rows, _ = query.shape
    scores = query.to(torch.float32) @ key.to(torch.float32).transpose(-1, -2) * scale
    if score_mod is not None:
        scores = score_mod(scores)
    head, row, place = (torch.arange(size, device=key.device) for size in (heads, rows, key.shape[2]))
    seen = block_mask.mask_mod(head.view(-1, 1, 1), head, row.view(-1, 1), place)
    weights = torch.softmax(scores.masked_fill(~seen.unsqueeze(1), float("-inf")), -1)
    return (weights @ value.to(torch.float32)).to(query.dtype)


@cache
def _compiled() -> Flex:
    from torch._dynamo import config as dynamo
    from torch._inductor import config as inductor  # takes a second, and is for this alone

    # By itself it starts a process for each core, which stay: a sandbox compiles few kernels, and has one core or two.
    inductor.compile_threads = 1
    # A size of one is a kernel by itself; at the limit torch goes on uncompiled, all scores in memory at once.
    dynamo.recompile_limit = 64
    # Of any number of rows and pages: not one kernel for each batch.
    return torch.compile(flex_attention, dynamic=True)


class FastAttention:
    """``attend`` of fast operators. ``flex``: other than flex attention compiled for CUDA, and plain operators
    elsewhere."""

    def __init__(self, flex: Flex | None = None) -> None:
        self._flex = flex

    def attend(
        self, q: torch.Tensor, k_pages: torch.Tensor, v_pages: torch.Tensor, tables: torch.Tensor, of: torch.Tensor,
        positions: torch.Tensor, scale: float, window: int, cap: float,
    ) -> torch.Tensor:  # fmt: skip
        """See ``Ops.attend``. The first call on CUDA compiles, which takes seconds."""
        rows, queries, width = q.shape
        pages, kv = k_pages.shape[:2]
        flex = self._flex or (_compiled() if q.is_cuda else unfused)
        seen: torch.Tensor = flex(
            q.to(k_pages.dtype).reshape(rows, kv, queries // kv, width).permute(1, 2, 0, 3),
            k_pages.view(1, 1, -1, width),
            v_pages.view(1, 1, -1, width),
            score_mod=_bending(cap) if cap else None,
            block_mask=sight_of(tables, of, positions, window, pages, kv).blocks(),
            scale=scale,
            enable_gqa=True,
            kernel_options=_tile(width * k_pages.itemsize, queries // kv),
        )
        return seen.permute(2, 0, 1, 3).reshape(rows, queries, width).to(q.dtype)


def _tile(nbytes: int, group: int) -> dict[str, int]:
    """Options of flex attention, where a head's part of a row has so many bytes, and a KV head a ``group`` of queries:
    tiles of queries and keys that any GPU has room for, and that have a row's whole group. For masks that read tables,
    as ours do, there is no room in those of its own choice; and of few rows it takes as many together as the batch has
    that it is compiled for, times the group: more than a block has is refused."""
    size = 64 if nbytes <= 256 else 32
    whole = max(size, group) if group & (group - 1) == 0 else size  # of other groups each query goes by itself
    return {"BLOCK_M": min(whole, _QUERIES), "BLOCK_N": size, "num_stages": 1}


def _bending(cap: float) -> Flex:
    def bent(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return bent
