"""The parts of a model on an accelerator, made of ``Ops``. None of them waits for the device."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.gpu.adapters import through
from sllm_runtime.worker.engine.ours.gpu.ops import Ops
from sllm_runtime.worker.engine.ours.lora import Product
from sllm_runtime.worker.engine.ours.model.backend import Linear, Mlp, Rows
from sllm_runtime.worker.engine.ours.model.parts import Experts
from sllm_runtime.worker.engine.ours.model.weights import side_by_side

DENSE: Final = 64
"""Up to so many rows go through every expert: few rows cost as much as the weights that are read for them."""


@dataclass(slots=True)
class Current:
    """The operators of the current step."""

    ops: Ops


class DeviceLinear:
    """One product for matrices that lie behind one another, else one for each."""

    def __init__(
        self, current: Current, matrices: Many[torch.Tensor], bias: torch.Tensor | None, lora: Product | None
    ) -> None:
        joined = side_by_side(matrices)
        self._matrices = list(matrices) if joined is None else [joined]
        sizes = [len(matrix) for matrix in self._matrices]
        ends = list(itertools.accumulate(sizes))
        self._biases = [None if bias is None else bias[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._current = current
        self._lora = lora

    def __call__(self, x: Rows) -> Rows:
        x, linear = x.to(self._matrices[0].dtype), self._current.ops.linear
        parts = [linear(x, matrix, bias) for matrix, bias in zip(self._matrices, self._biases, strict=True)]
        return self._adapted(x, parts[0] if len(parts) == 1 else torch.cat(parts, 1))

    def wide(self, x: Rows) -> Rows:
        return self(x).to(torch.float32, memory_format=torch.contiguous_format)

    def added(self, x: Rows, residual: Rows) -> Rows:
        x = x.to(self._matrices[0].dtype)
        return self._adapted(x, self._current.ops.linear_added(x, self._matrices[0], residual, self._biases[0]))

    def _adapted(self, x: Rows, out: Rows) -> Rows:
        if self._lora is not None and self._lora.lora.groups:
            self._lora.add(x, out, partial(through, self._current.ops))
        return out


class DeviceRmsNorm:
    """See ``Backend.rms_norm``."""

    def __init__(self, current: Current, weight: torch.Tensor, eps: float, plus: float) -> None:
        self._current, self._scale, self._eps = current, weight.float() + plus, eps

    def __call__(self, x: Rows) -> Rows:
        return self._current.ops.rms_norm(x, self._scale, self._eps)


class DeviceLayerNorm:
    """See ``Backend.layer_norm``."""

    def __init__(self, current: Current, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self._current, self._weight, self._bias, self._eps = current, weight, bias, eps

    def __call__(self, x: Rows) -> Rows:
        return self._current.ops.layer_norm(x, self._weight, self._bias, self._eps)


class DeviceExperts(Experts):
    """Few rows go through every expert, and each takes its own: which ones it has is known on the device alone, and a
    step that waited for it could not be captured. In exact mode a row has the same bits either way.

    ``experts`` are a run of numbers: all of them, or a rank's."""

    def __init__(self, gate: Linear, experts: Mapping[int, Mlp], top: int, tile: int) -> None:
        super().__init__(gate, experts, top, tile)
        self._first = min(experts)
        self._all = [experts[self._first + at] for at in range(len(experts))]

    def _parts(self, x: Rows, chosen: torch.Tensor) -> Rows:
        if len(x) > DENSE:
            return super()._parts(x, chosen)
        every = torch.stack([expert(x) for expert in self._all], 1)
        own = chosen - self._first
        here = own.clamp(0, len(self._all) - 1)
        parts = every.gather(1, here.unsqueeze(2).expand(-1, -1, x.shape[1]))
        # Another rank's: nothing, whatever the one that stands in for it made.
        return parts.masked_fill((own != here).unsqueeze(2), 0.0)
