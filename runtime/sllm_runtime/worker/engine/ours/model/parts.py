"""What layers are made of. Activations are matrices (rows, width) of the model's dtype; every part treats a row by
itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.nn import functional as F

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.model.backend import Gate, Linear, Mlp, Norm, Projection, Rows
from sllm_runtime.worker.engine.ours.model.weights import Weights

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


def linear(weights: Weights, inputs: int, outputs: Mapping[str, int], *, bias: bool = False) -> Projection:
    """Of ``name.weight`` for each name in ``outputs``, which says how many outputs it has."""
    matrices = [weights.get(f"{name}.weight", each, inputs) for name, each in outputs.items()]
    lora = weights.lora.product(outputs)
    if not bias:
        return weights.backend.linear(matrices, None, lora)
    biases = [weights.get(f"{name}.bias", each) for name, each in outputs.items()]
    return weights.backend.linear(matrices, biases[0] if len(biases) == 1 else torch.cat(biases), lora)


def transposed(weights: Weights, name: str, inputs: int, outputs: int) -> Projection:
    """Of a matrix with a bias that is stored as (in, out)."""
    matrix, bias = weights.get(f"{name}.weight", inputs, outputs).t(), weights.get(f"{name}.bias", outputs)
    return weights.backend.linear([matrix], bias, weights.lora.product({name: outputs}))


def output_head(weights: Weights, config: Any, table: torch.Tensor) -> Callable[[Rows], Rows]:
    """From hidden rows to logits in float32; the embedding ``table`` if it is tied to that."""
    name = "lm_head.weight"
    tied = config.tie_word_embeddings and name not in weights
    return weights.backend.linear([table if tied else weights.get(name, *table.shape)], None, None).wide


def rms_norm(weights: Weights, name: str, width: int, eps: float, plus: float = 0.0) -> Norm:
    """Of ``name.weight``; ``plus``: what the stored weight lacks (Gemma stores w - 1)."""
    return weights.backend.rms_norm(weights.get(f"{name}.weight", width), eps, plus)


def layer_norm(weights: Weights, name: str, width: int, eps: float) -> Norm:
    """Of ``name.weight`` and ``name.bias``."""
    return weights.backend.layer_norm(weights.get(f"{name}.weight", width), weights.get(f"{name}.bias", width), eps)


class ActivationGate:
    """See ``Gate``; by torch."""

    def __init__(self, act: Activation) -> None:
        self._act = act

    def __call__(self, both: Rows) -> Rows:
        width = both.shape[1] // 2
        return self._act(both[:, :width]).mul_(both[:, width:])


class Gated:
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, gate_up: Linear, down: Linear, gate: Gate) -> None:
        self._gate_up, self._down, self._gate = gate_up, down, gate

    def __call__(self, x: Rows) -> Rows:
        return self._down(self._gate(self._gate_up(x)))

    def added(self, x: Rows, residual: Rows) -> Rows:
        return self._down.added(self._gate(self._gate_up(x)), residual)


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

    def __init__(self, gate: Linear, experts: Mapping[int, Mlp], top: int, tile: int) -> None:
        self._gate, self._experts, self._top, self._tile = gate, experts, top, tile

    def __call__(self, x: Rows) -> Rows:
        odds, chosen = torch.softmax(self._gate(x).float(), -1).topk(self._top)
        odds = odds / odds.sum(-1, keepdim=True)
        weighted = self._parts(x, chosen) * odds.unsqueeze(2)
        total = weighted[:, 0]
        for rank in range(1, self._top):
            total = total + weighted[:, rank]
        return total.to(x.dtype)

    def _parts(self, x: Rows, chosen: torch.Tensor) -> Rows:
        """What the experts ``chosen`` (rows, top) make of their rows: (rows, top, width)."""
        parts = x.new_zeros(x.shape[0] * self._top, x.shape[1])
        flat = chosen.view(-1)
        for number, expert in self._experts.items():
            mine = (flat == number).nonzero().view(-1)
            if mine.numel():
                rows = F.pad(mine, (0, -mine.numel() % self._tile)) // self._top
                parts.index_copy_(0, mine, expert(x.index_select(0, rows))[: mine.numel()])
        return parts.view(-1, self._top, x.shape[1])

    def added(self, x: Rows, residual: Rows) -> Rows:
        return residual + self(x)
