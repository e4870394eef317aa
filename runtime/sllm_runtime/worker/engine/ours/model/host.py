"""A model on the CPU: products by a kernel of our own, by torch, turned where that pays, or in slabs by numpy; what
treats each row by itself by compiled kernels; KV in float32."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Final

import numpy as np
import torch
from torch.nn import functional as F

from sllm_runtime.worker.engine.ours.adapter import Adapter
from sllm_runtime.worker.engine.ours.attention import Floats, Heads
from sllm_runtime.worker.engine.ours.batch import Batches
from sllm_runtime.worker.engine.ours.kernels.loaded import kernels
from sllm_runtime.worker.engine.ours.kv import KvShape, KvStore
from sllm_runtime.worker.engine.ours.lora import Product
from sllm_runtime.worker.engine.ours.model import slabs, turned
from sllm_runtime.worker.engine.ours.model.backend import Gate, Kv, Linear, Mlp, Norm, Projection, Rows, Steps
from sllm_runtime.worker.engine.ours.model.compiled import Compiled
from sllm_runtime.worker.engine.ours.model.parts import ActivationGate, Experts, activation
from sllm_runtime.worker.engine.ours.model.products import Products
from sllm_runtime.worker.engine.ours.model.slabs import Slabs
from sllm_runtime.worker.engine.ours.model.weights import side_by_side
from sllm_runtime.worker.engine.ours.numerics import EXACT, LEVELS, Numerics

VARIABLES: Final = (
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "OPENBLAS_CORETYPE",
)
KNOWN: Final = (torch.float32, torch.bfloat16)
"""Of activations, that kernels compute with."""


class Host:
    """See ``Backend``."""

    device = torch.device("cpu")
    bound = "memory"
    shared = False
    levels = LEVELS
    otherwise = EXACT
    refusals = ()

    def __init__(self) -> None:
        self._products = Products()

    def broken(self) -> str:
        """See ``Backend.broken``."""
        return ""

    def current(self) -> contextlib.AbstractContextManager[object]:
        """See ``Backend.current``."""
        return contextlib.nullcontext()

    def marks(self) -> tuple[str, ...]:
        """See ``Backend.marks``."""
        return (
            kernels().digest, np.__version__, torch.__version__, torch.__config__.show(),
            torch.backends.cpu.get_cpu_capability(), str(torch.get_num_threads()), str(turned.available()),
            str(kernels().tiles), str(slabs.available()),
            *(os.environ.get(name, "") for name in VARIABLES),
        )  # fmt: skip

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """See ``Backend.use``."""
        self._products.use(numerics, dtype)

    def linear(self, matrices: Many[torch.Tensor], bias: torch.Tensor | None, lora: Product | None) -> Projection:
        """See ``Backend.linear``."""
        return HostLinear(self._products, matrices, bias, lora)

    def take(self, adapter: Adapter) -> None:
        """See ``Backend.take``: they are where they were read."""

    def rms_norm(self, weight: torch.Tensor, eps: float, plus: float) -> Norm:
        """See ``Backend.rms_norm``."""
        return HostRmsNorm(weight, eps, plus)

    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Norm:
        """See ``Backend.layer_norm``."""
        return HostLayerNorm(weight, bias, eps)

    def gate(self, name: str) -> Gate:
        """See ``Backend.gate``."""
        act = activation(name)
        return silu_gate if act is F.silu else ActivationGate(act)

    def experts(self, gate: Linear, experts: Mapping[int, Mlp], top: int, tile: int) -> Mlp:
        """See ``Backend.experts``."""
        return Experts(gate, experts, top, tile)

    def kv_shape(self, layers: int, heads: Heads, dtype: torch.dtype) -> KvShape:
        """See ``Backend.kv_shape``: in float32 whatever ``dtype`` is."""
        return KvShape(layers, heads.kv, heads.width)

    def cache(
        self, shape: KvShape, pages: int, heads: Heads, numerics: Numerics, dtype: torch.dtype
    ) -> tuple[Kv, Steps]:  # fmt: skip
        """See ``Backend.cache``."""
        kv = KvStore(shape, pages)
        return kv, Batches(kv, heads, numerics)


class HostLinear:
    """One product for matrices that lie behind one another, else one for each."""

    def __init__(
        self, products: Products, weights: Many[torch.Tensor], bias: torch.Tensor | None, lora: Product | None
    ) -> None:
        joined = side_by_side(weights)
        self._weights = [joined] if joined is not None else list(weights)
        self._columns = [weight.t() for weight in self._weights]
        self._dtype = self._weights[0].dtype
        self._outputs = sum(map(len, self._weights))
        found = [Compiled.of(weight, products.scratch) for weight in self._weights]
        self._compiled = [each for each in found if each is not None] if None not in found else []
        self._turned: list[turned.Turned] = []
        if turned.available() and all(weight.dtype == torch.bfloat16 for weight in self._weights):
            self._turned = [turned.Turned(weight) for weight in self._weights]
        self._products = products
        self._slabs: list[Slabs | None] | None = None
        self._bias = bias
        self._lora = lora

    def __call__(self, x: Rows) -> Rows:
        return self._adapted(x, self._product(x))

    def wide(self, x: Rows) -> Rows:
        if self._own:
            out = self._by_kernels(x.to(self._dtype), None, torch.float32)
            return self._adapted(x, out if self._bias is None else out.add_(self._bias))
        return self(x).to(torch.float32, memory_format=torch.contiguous_format)

    def _adapted(self, x: Rows, out: Rows) -> Rows:
        if self._lora is not None and self._lora.lora.groups:
            self._lora.add(x, out)
        return out

    @property
    def _own(self) -> Many[Compiled]:
        """Kernels of our own, where they compute this step."""
        return self._compiled if self._products.compiled else ()

    def _product(self, x: Rows) -> Rows:
        if self._own:
            out = self._by_kernels(x, None, self._dtype)
            return out if self._bias is None else out.add_(self._bias)
        if self._products.slabs:
            out = torch.from_numpy(self._by_slabs(x))
            return out if self._bias is None else out.add_(self._bias)
        x = x.to(self._dtype)
        if self._turned:
            parts = [product(x) for product in self._turned]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            return out if self._bias is None else out.add_(self._bias)
        if len(self._columns) == 1:
            only = self._columns[0]
            return torch.mm(x, only) if self._bias is None else torch.addmm(self._bias, x, only)
        out = torch.cat([torch.mm(x, columns) for columns in self._columns], 1)
        return out if self._bias is None else out.add_(self._bias)

    def _by_kernels(self, x: Rows, residual: Rows | None, dtype: torch.dtype) -> Rows:
        x = x.contiguous()
        out = torch.empty(len(x), self._outputs, dtype=dtype)
        at = 0
        for product in self._own:
            product(x, out, at, residual)
            at += product.outputs
        return out

    def _by_slabs(self, x: Rows) -> Floats:
        if self._slabs is None:
            self._slabs = [Slabs.of(weight) for weight in self._weights]
        out: Floats = np.empty((len(x), self._outputs), np.float32)
        at = 0
        for made, weight, columns in zip(self._slabs, self._weights, self._columns, strict=True):
            into = out[:, at : at + len(weight)]
            if made is None:
                into[:] = torch.mm(F.pad(x, (0, 0, 0, -len(x) % 4)), columns)[: len(x)].numpy()
            else:
                made(x.numpy(), into)
            at += len(weight)
        return out

    def added(self, x: Rows, residual: Rows) -> Rows:
        if self._turned and not self._own:
            return residual + self(x)
        if self._bias is not None:
            residual = residual + self._bias
        if self._own:
            return self._adapted(x, self._by_kernels(x, residual.contiguous(), self._dtype))
        if self._products.slabs:
            product = self._by_slabs(x)
            product += residual.numpy()
            return self._adapted(x, torch.from_numpy(product))
        x = x.to(self._dtype)
        return self._adapted(x, torch.addmm(residual, x, self._columns[0]))


class HostRmsNorm:
    """RMSNorm by a kernel of our own."""

    def __init__(self, weight: torch.Tensor, eps: float, plus: float) -> None:
        width = weight.shape[0]
        # sqrt(mean + eps) = sqrt(sum + eps * width) / sqrt(width): the last root is in the scale.
        self._scale = (weight.float() + plus) * math.sqrt(width)
        self._eps = eps * width

    def __call__(self, x: Rows) -> Rows:
        if x.dtype not in KNOWN:
            return self(x.float()).to(x.dtype)
        x = x.contiguous()
        out, width = torch.empty_like(x), x.shape[-1]
        found = kernels()
        norm = found.norm if x.dtype == torch.float32 else found.norm_bfloat16
        norm(x.data_ptr(), x.numel() // width, width, self._scale.data_ptr(), self._eps, out.data_ptr())
        return out


def silu_gate(both: Rows) -> Rows:
    """See ``Gate``, by a kernel. The result lies in memory as ``both`` does."""
    if both.dtype not in KNOWN:
        return silu_gate(both.float()).to(both.dtype)
    rows, width = len(both), both.shape[1] // 2
    turned_round = not both.is_contiguous() and both.t().is_contiguous()
    if turned_round:
        out, (rows, width) = torch.empty(width, rows, dtype=both.dtype).t(), (1, rows * width)
    else:
        both = both.contiguous()
        out = torch.empty(rows, width, dtype=both.dtype)
    found = kernels()
    gate = found.gate if both.dtype == torch.float32 else found.gate_bfloat16
    gate(both.data_ptr(), rows, width, out.data_ptr())
    return out


class HostLayerNorm:
    """LayerNorm by torch."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> None:
        self._weight, self._bias, self._eps = weight, bias, eps

    def __call__(self, x: Rows) -> Rows:
        return F.layer_norm(x, (x.shape[-1],), self._weight, self._bias, self._eps)
