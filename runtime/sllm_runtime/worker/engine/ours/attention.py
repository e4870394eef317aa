"""Attention over pages, the same arithmetic for a decode row and for any row of a prefill.

Scores are products of (a page's queries) x (a page's keys). Softmax goes over a row's pages in float32, and the pages'
parts of P.V are added in order. More pages than a row needs change none of its bits: their scores are -inf and their
parts are zero. Two ways lead there, with the same bits: rows of one table (``attention_rows``: a chunk of a prefill, a
decode row by itself), and decode rows of many tables at once (``attention_batch``).

The products are numpy's: its BLAS has kernels for small matrices that take half the time of torch's batched product,
and they write where the result belongs, so that nothing is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from sllm_runtime.protocol.checkpoint import align
from sllm_runtime.worker.engine.ours.pages import PAGE

Floats = npt.NDArray[np.float32]
_FILLED: Final = 32


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
class Look:
    """How a layer looks: ``scale`` of the scores, ``window`` of positions (0: all before), ``cap``: scores are bent
    below it by tanh (0: they are not)."""

    scale: float
    window: int = 0
    cap: float = 0.0


class Group(Protocol):
    """Rows of one step that go through attention together, with buffers that its layers share."""

    def attend(self, qkv: torch.Tensor, k: Floats, v: Floats, look: Look, seen: torch.Tensor) -> None:
        """Put what this group's rows see into ``seen`` (rows, queries * width). ``qkv`` (rows, queries + 2 * kv, width)
        as projected, of all rows; ``k`` (pages, kv, 1, width, PAGE), ``v`` (pages, kv, 1, PAGE, width); all float32."""


def filled(position: int) -> int:
    """How many places of the page of ``position`` are computed for a sequence that ends there: whole vectors, so that
    softmax has its sums in one order, and few enough widths of products. More would change no bit."""
    return align(position % PAGE + 1, _FILLED)


def tiles(matrix: Floats, tile: int) -> Floats:
    """A view of (..., m, n) as (..., m / tile, tile, n): what ``np.matmul`` multiplies in one product each. ``m`` is
    a whole number of tiles, or less than one."""
    *lead, rows, width = matrix.shape
    size = min(rows, tile)
    return matrix.reshape(*lead, rows // size, size, width)


def bent(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """In place, each below ``cap``."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


def mask_of(positions: torch.Tensor, first: int, count: int, window: int) -> torch.Tensor:
    """Float32 (rows, 1, count): 0 where a row at one of ``positions`` may look among the places from ``first`` on, -inf
    elsewhere."""
    places = torch.arange(first, first + count)
    here = positions.unsqueeze(1)
    away = places > here
    if window:
        away |= places <= here - window
    return torch.zeros(away.shape).masked_fill_(away, float("-inf")).unsqueeze(1)
