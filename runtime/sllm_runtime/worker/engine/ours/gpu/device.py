"""A model on an accelerator: which operators each level takes, parts and KV made for them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Final

import torch

from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.gpu.fast_ops import FastOps
from sllm_runtime.worker.engine.ours.gpu.kv import DeviceKv
from sllm_runtime.worker.engine.ours.gpu.ops import Ops
from sllm_runtime.worker.engine.ours.gpu.parts import (
    Current,
    DeviceExperts,
    DeviceLayerNorm,
    DeviceLinear,
    DeviceRmsNorm,
)
from sllm_runtime.worker.engine.ours.gpu.steps import DeviceSteps
from sllm_runtime.worker.engine.ours.kv import KvShape
from sllm_runtime.worker.engine.ours.lora import Product
from sllm_runtime.worker.engine.ours.model.backend import Linear, Mlp, Norm
from sllm_runtime.worker.engine.ours.numerics import GPU_EXACT, GPU_FAST, Numerics

log = logging.getLogger(__name__)
_DRIVER: Final = Path("/proc/driver/nvidia/version")


class Device:
    """See ``Backend``. ``exact``: operators of the exact level; None: it is not offered."""

    otherwise = GPU_FAST

    def __init__(self, device: torch.device, fast: Ops, exact: Ops | None) -> None:
        self.device = device
        self.levels: tuple[Numerics, ...] = () if exact is None else (GPU_EXACT,)
        self.refusals: tuple[type[Exception], ...] = () if exact is None else exact.refusals
        self._ops = {GPU_FAST.name: fast, GPU_EXACT.name: exact or fast}
        self._current = Current(fast)

    @classmethod
    def here(cls, device: torch.device) -> Device:
        """With the operators that can be had on ``device``."""
        return cls(device, FastOps(), _exact())

    def marks(self) -> tuple[str, ...]:
        """See ``Backend.marks``."""
        return (torch.__version__, *(self._ops[level.name].name for level in self.levels), *_marks(self.device))

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """See ``Backend.use``."""
        self._current.ops = self._ops[numerics.name]

    def linear(self, matrices: Many[torch.Tensor], bias: torch.Tensor | None, lora: Product | None) -> Linear:
        """See ``Backend.linear``. There are no adapters here (``DeviceRunner.lora``)."""
        return DeviceLinear(self._current, matrices, bias)

    def rms_norm(self, weight: torch.Tensor, eps: float, plus: float) -> Norm:
        """See ``Backend.rms_norm``."""
        return DeviceRmsNorm(self._current, weight, eps, plus)

    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Norm:
        """See ``Backend.layer_norm``."""
        return DeviceLayerNorm(self._current, weight, bias, eps)

    def experts(self, gate: Linear, experts: Mapping[int, Mlp], top: int, tile: int) -> Mlp:
        """See ``Backend.experts``."""
        return DeviceExperts(gate, experts, top, tile)

    def kv_shape(self, layers: int, heads: Heads, dtype: torch.dtype) -> KvShape:
        """See ``Backend.kv_shape``."""
        return KvShape(layers, heads.kv, heads.width, dtype.itemsize)

    def cache(
        self, shape: KvShape, pages: int, heads: Heads, numerics: Numerics, dtype: torch.dtype
    ) -> tuple[DeviceKv, DeviceSteps]:
        """See ``Backend.cache``. Raises ``OutOfMemory``."""
        kv = DeviceKv(shape, pages, dtype, self.device)
        return kv, DeviceSteps(kv, heads, numerics, self._ops[numerics.name], self.device)


def _exact() -> Ops | None:
    try:
        from sllm_runtime.worker.engine.ours.gpu.exact import ExactOps
    except ImportError as error:  # triton comes with torch for CUDA on Linux alone
        log.warning("there is no exact mode here, triton is missing: %s", error)
        return None
    return ExactOps()


def _marks(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (str(device),)
    version = getattr(sys.modules.get("triton"), "__version__", "")  # imported where it computes
    found = torch.cuda.get_device_properties(device)
    driver = _DRIVER.read_text().partition("\n")[0] if _DRIVER.exists() else ""
    return (found.name, f"{found.major}.{found.minor}", str(torch.version.cuda), driver, version)
