"""Where and how a model is computed, chosen once from where its weights are: ``host`` or ``gpu.device``.

Families know nothing of it. A part is made by the backend when its weights are there; a step does not ask which it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Protocol

import torch

from sllm_runtime.worker.engine.ours.adapter import Adapter
from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.batch import Batch, Part
from sllm_runtime.worker.engine.ours.kv import KvShape
from sllm_runtime.worker.engine.ours.lora import Product
from sllm_runtime.worker.engine.ours.numerics import Numerics

Rows = torch.Tensor


class Norm(Protocol):
    """Normalises each row."""

    def __call__(self, x: Rows) -> Rows: ...


class Mlp(Protocol):
    """The feed-forward part of a layer, row by row; ``added`` to a residual."""

    def __call__(self, x: Rows) -> Rows: ...

    def added(self, x: Rows, residual: Rows) -> Rows: ...


class Gate(Protocol):
    """act(gate) * up of each row, (rows, gate and up side by side)."""

    def __call__(self, both: Rows) -> Rows: ...


class Linear(Protocol):
    """The product of rows with one or several matrices, outputs side by side; ``added`` to a residual. Rows in float32
    are rounded to the model's dtype."""

    def __call__(self, x: Rows) -> Rows: ...

    def added(self, x: Rows, residual: Rows) -> Rows: ...


class Projection(Linear, Protocol):
    """One whose outputs somebody computes with in float32."""

    def wide(self, x: Rows) -> Rows:
        """The product in dense float32, whether or not it was rounded to the model's dtype before."""


class Kv(Protocol):
    """The pages of a KV cache, all layers of a stage."""

    @property
    def pages(self) -> int:
        """How many a sequence may have; the one behind them is for rows that pad a step."""

    def clear(self, page: int) -> None:
        """Zero a page that changes hands."""

    def read(self, page: int) -> torch.Tensor:
        """A copy of one page, on the CPU."""

    def fill(self, page: int, content: torch.Tensor) -> None:
        """Put what ``read`` gave. Raises ``ValueError`` for what is no page of such a cache."""


class Steps(Protocol):
    """Makes steps over one KV cache."""

    def make(self, chunks: Many[Part]) -> Batch:
        """The step for ``chunks``, decodes (single positions) first."""


class Backend(Protocol):
    """Makes a model's parts for one kind of device. One for each model."""

    @property
    def device(self) -> torch.device:
        """Where weights, activations and KV are."""

    @property
    def bound(self) -> str:
        """The option of ``@model_function`` that bounds the KV cache."""

    @property
    def shared(self) -> bool:
        """Whether the KV cache is in memory of which more or less is free at each start; else the manifest says how
        much there is."""

    def broken(self) -> str:
        """Why nothing more can be computed in this process, if that is so; asked when a step has failed."""

    @property
    def levels(self) -> tuple[Numerics, ...]:
        """Of exactness, from cheap to strict: the first that the self-test proves is taken."""

    @property
    def otherwise(self) -> Numerics:
        """The level where none holds."""

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """What a level raises that cannot be computed on this machine: a kernel that its compiler or its processor
        does not take."""

    def current(self) -> contextlib.AbstractContextManager[object]:
        """What this thread computes in it is launched on ``device``."""

    def marks(self) -> tuple[str, ...]:
        """What decides the bits beside the model: libraries, processor, settings."""

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """The parts compute the current step at that level."""

    def linear(self, matrices: Many[torch.Tensor], bias: torch.Tensor | None, lora: Product | None) -> Projection:
        """Of matrices of shape (out, in) that take the same rows."""

    def take(self, adapter: Adapter) -> None:
        """Have the matrices of ``adapter`` where this computes, ready for the next step. From any thread. Raises
        ``OutOfMemory``, and ``UnsupportedModel`` for what cannot be computed there."""

    def rms_norm(self, weight: torch.Tensor, eps: float, plus: float) -> Norm:
        """x / sqrt(mean(x^2) + eps) * (weight + plus), in float32."""

    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Norm:
        """With mean and bias, as F.layer_norm."""

    def gate(self, name: str) -> Gate:
        """With the activation that transformers calls ``name``. Raises ``UnsupportedModel``."""

    def experts(self, gate: Linear, experts: Mapping[int, Mlp], top: int, tile: int) -> Mlp:
        """Each row goes through its ``top`` likeliest experts. ``experts``: by number; those that another rank has add
        nothing here. ``tile``: what an expert's rows are padded to."""

    def kv_shape(self, layers: int, heads: Heads, dtype: torch.dtype) -> KvShape:
        """Of a stage of a model whose activations are ``dtype``."""

    def cache(
        self, shape: KvShape, pages: int, heads: Heads, numerics: Numerics, dtype: torch.dtype
    ) -> tuple[Kv, Steps]:  # fmt: skip
        """A KV cache with nothing in it, and what makes steps over it. ``shape``: this backend's, for ``dtype``."""
