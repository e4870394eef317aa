"""What layers are made of. Activations are matrices (rows, width) of the model's dtype; every part treats a row by
itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.attention import Floats
from sllm_runtime.worker.engine.ours.lora import Product
from sllm_runtime.worker.engine.ours.model.slabs import Products, Slabs
from sllm_runtime.worker.engine.ours.model.weights import Weights, side_by_side

Rows = torch.Tensor
Activation = Callable[[Rows], Rows]

ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def activation(name: str) -> Activation:
    """By transformers' name. Raises ``UnsupportedModel``."""
    if name not in ACTIVATIONS:
        raise UnsupportedModel(f"activation {name!r} is unknown to this engine")
    return ACTIVATIONS[name]


class Linear:
    """One product for one or several matrices of shape (out, in) that take the same rows, outputs side by side."""

    def __init__(
        self, products: Products, weights: Sequence[torch.Tensor], bias: torch.Tensor | None = None,
        lora: Product | None = None,
    ) -> None:  # fmt: skip
        joined = side_by_side(weights)
        self._weights = [joined] if joined is not None else list(weights)
        self._columns = [weight.t() for weight in self._weights]
        self._products = products
        self._slabs: list[Slabs | None] | None = None
        self._bias = bias
        self._lora = lora

    @classmethod
    def named(cls, weights: Weights, inputs: int, outputs: Mapping[str, int], *, bias: bool = False) -> Linear:
        """Of ``name.weight`` for each name in ``outputs``, which says how many outputs it has."""
        matrices = [weights.get(f"{name}.weight", each, inputs) for name, each in outputs.items()]
        lora = weights.lora.product(outputs)
        if not bias:
            return cls(weights.products, matrices, None, lora)
        biases = [weights.get(f"{name}.bias", each) for name, each in outputs.items()]
        return cls(weights.products, matrices, biases[0] if len(biases) == 1 else torch.cat(biases), lora)

    @classmethod
    def transposed(cls, weights: Weights, name: str, inputs: int, outputs: int) -> Linear:
        """Of a matrix with a bias that is stored as (in, out)."""
        matrix, bias = weights.get(f"{name}.weight", inputs, outputs).t(), weights.get(f"{name}.bias", outputs)
        return cls(weights.products, [matrix], bias, weights.lora.product({name: outputs}))

    @classmethod
    def head(cls, weights: Weights, config: Any, table: torch.Tensor) -> Linear:
        """The output head, or the embedding ``table`` if it is tied to that."""
        name = "lm_head.weight"
        tied = config.tie_word_embeddings and name not in weights
        return cls(weights.products, [table if tied else weights.get(name, *table.shape)])

    def __call__(self, x: Rows) -> Rows:
        out = self._product(x)
        if self._lora is not None and self._lora.lora.groups:
            self._lora.add(x, out)
        return out

    def _product(self, x: Rows) -> Rows:
        if self._products.slabs:
            out = torch.from_numpy(self._by_slabs(x))
            return out if self._bias is None else out.add_(self._bias)
        if len(self._columns) == 1:
            only = self._columns[0]
            return torch.mm(x, only) if self._bias is None else torch.addmm(self._bias, x, only)
        out = torch.cat([torch.mm(x, columns) for columns in self._columns], 1)
        return out if self._bias is None else out.add_(self._bias)

    def _by_slabs(self, x: Rows) -> Floats:
        if self._slabs is None:
            self._slabs = [Slabs.of(weight) for weight in self._weights]
        out: Floats = np.empty((len(x), sum(map(len, self._weights))), np.float32)
        at = 0
        for slabs, weight, columns in zip(self._slabs, self._weights, self._columns, strict=True):
            into = out[:, at : at + len(weight)]
            if slabs is None:
                into[:] = torch.mm(F.pad(x, (0, 0, 0, -len(x) % 4)), columns)[: len(x)].numpy()
            else:
                slabs(x.numpy(), into)
            at += len(weight)
        return out

    def added(self, x: Rows, residual: Rows) -> Rows:
        """``residual`` + the product."""
        if self._bias is not None:
            residual = residual + self._bias
        if self._products.slabs:
            product = self._by_slabs(x)
            product += residual.numpy()
            out = torch.from_numpy(product)
        else:
            out = torch.addmm(residual, x, self._columns[0])
        if self._lora is not None and self._lora.lora.groups:
            self._lora.add(x, out)
        return out


class Norm(Protocol):
    """Of each row."""

    def __call__(self, x: Rows) -> Rows: ...


class RmsNorm:
    """x / sqrt(mean(x^2) + eps) * weight, in float32. ``plus``: what the stored weight lacks (Gemma stores w - 1).

    By numpy, whose operators on few rows take half the time of torch's.
    """

    def __init__(self, weight: torch.Tensor, eps: float, plus: float = 0.0) -> None:
        width = weight.shape[0]
        # sqrt(mean + eps) = sqrt(sum + eps * width) / sqrt(width): the last root is in the scale.
        self._scale: Floats = ((weight.float() + plus) * math.sqrt(width)).numpy()
        self._eps = np.float32(eps * width)

    def __call__(self, x: Rows) -> Rows:
        wide: Floats = x.to(torch.float32).numpy()
        size: Floats = np.vecdot(wide, wide)
        size += self._eps
        np.sqrt(size, out=size)
        out: Floats = wide / size[..., None]
        out *= self._scale
        return torch.from_numpy(out).to(x.dtype)


class LayerNorm:
    """With mean and bias, as F.layer_norm."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    @classmethod
    def named(cls, weights: Weights, name: str, width: int, eps: float) -> LayerNorm:
        """Of ``name.weight`` and ``name.bias``."""
        return cls(weights.get(f"{name}.weight", width), weights.get(f"{name}.bias", width), eps)

    def __call__(self, x: Rows) -> Rows:
        return F.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)


class Mlp(Protocol):
    """Of each row; ``added`` to a residual."""

    def __call__(self, x: Rows) -> Rows: ...

    def added(self, x: Rows, residual: Rows) -> Rows: ...


class Gated:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, act: Activation) -> None:
        self._gate_up, self._down, self._act = gate_up, down, act

    def _inner(self, x: Rows) -> Rows:
        both = self._gate_up(x)
        width = both.shape[1] // 2
        return self._act(both[:, :width]).mul_(both[:, width:])

    def __call__(self, x: Rows) -> Rows:
        return self._down(self._inner(x))

    def added(self, x: Rows, residual: Rows) -> Rows:
        return self._down.added(self._inner(x), residual)


class Plain:
    """down(act(up(x)))."""

    def __init__(self, up: Linear, down: Linear, act: Activation) -> None:
        self._up, self._down, self._act = up, down, act

    def __call__(self, x: Rows) -> Rows:
        return self._down(self._act(self._up(x)))

    def added(self, x: Rows, residual: Rows) -> Rows:
        return self._down.added(self._act(self._up(x)), residual)


class Experts:
    """Each row goes through its ``top`` likeliest experts. An expert's rows are padded to ``tile`` like any product,
    and a row's experts are added in the order of their odds, so it does not matter which rows share an expert.
    ``experts``: by number; those that another rank has add nothing here."""

    def __init__(self, gate: Linear, experts: Mapping[int, Gated], top: int, tile: int) -> None:
        self._gate, self._experts, self._top, self._tile = gate, experts, top, tile

    def __call__(self, x: Rows) -> Rows:
        odds, chosen = torch.softmax(self._gate(x).float(), -1).topk(self._top)
        odds = odds / odds.sum(-1, keepdim=True)
        parts = x.new_zeros(x.shape[0] * self._top, x.shape[1])
        flat = chosen.view(-1)
        for number, expert in self._experts.items():
            mine = (flat == number).nonzero().view(-1)
            if mine.numel():
                rows = F.pad(mine, (0, -mine.numel() % self._tile)) // self._top
                parts.index_copy_(0, mine, expert(x.index_select(0, rows))[: mine.numel()])
        weighted = parts.view(-1, self._top, x.shape[1]) * odds.unsqueeze(2)
        total = weighted[:, 0]
        for rank in range(1, self._top):
            total = total + weighted[:, rank]
        return total.to(x.dtype)

    def added(self, x: Rows, residual: Rows) -> Rows:
        return residual + self(x)
