"""A model of many bytes and little arithmetic, whose first token depends on every tensor: for loading, measured."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from sllm import Model, model_function

STEP = 32768
"""The first token takes one element of every 64 KiB; all of them are summed only on request."""


class Tensors(nn.Module):
    """``count`` parameters of the same shape."""

    def __init__(self, count: int, rows: int, columns: int) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.empty(rows, columns) for _ in range(count))

    def digest(self, step: int) -> int:
        """Of every ``step``-th element's bits of every tensor, each tensor with a factor of its own."""
        total = 0
        for number, tensor in enumerate(self.tensors, 1):
            total += number * int(tensor.detach().view(torch.int16).flatten()[::step].sum(dtype=torch.int64))
        return total


def build(config: dict[str, Any]) -> nn.Module:
    """The empty module."""
    return Tensors(config["count"], config["rows"], config["columns"])


@model_function(model="model", model_loader="build", engine=False, memory="2GiB", keep_alive="0s")
def gigabyte(model: Model, every: bool = False) -> Iterator[str]:
    """One token: a digest of all tensors."""
    yield str(model.module.digest(1 if every else STEP))
