"""A model on an accelerator: which operators each level takes, parts and KV made for them."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from functools import partial
from pathlib import Path
from typing import Final

import torch

from sllm_runtime.protocol.errors import OutOfMemory, UnsupportedModel
from sllm_runtime.protocol.quantities import show_bytes
from sllm_runtime.worker.engine import devices
from sllm_runtime.worker.engine.ours.adapter import TILE, Adapter
from sllm_runtime.worker.engine.ours.attention import Heads
from sllm_runtime.worker.engine.ours.gpu.adapters import alike
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
from sllm_runtime.worker.engine.ours.model.backend import Gate, Linear, Mlp, Norm, Projection
from sllm_runtime.worker.engine.ours.model.parts import ActivationGate, activation
from sllm_runtime.worker.engine.ours.numerics import GPU_EXACT, GPU_FAST, Numerics

log = logging.getLogger(__name__)
_DRIVER: Final = Path("/proc/driver/nvidia/version")


class Device:
    """See ``Backend``. ``exact``: operators of the exact level; None: it is not offered. ``free``: bytes of its memory
    that nobody has; None: it is not the device's that counts. ``ask``: raises where the device computes nothing more
    for this process."""

    bound = "gpu_memory"
    otherwise = GPU_FAST

    def __init__(
        self,
        device: torch.device,
        fast: Ops,
        exact: Ops | None,
        free: Callable[[], int] | None = None,
        ask: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.free = free
        self._ask = ask
        self.levels: tuple[Numerics, ...] = () if exact is None else (GPU_EXACT,)
        self.refusals: tuple[type[Exception], ...] = () if exact is None else exact.refusals
        self._ops = {GPU_FAST.name: fast, GPU_EXACT.name: exact or fast}
        self._current = Current(fast)

    @classmethod
    def here(cls, device: torch.device) -> Device:
        """With the operators that can be had on ``device``."""
        if device.type != "cuda":
            return cls(device, FastOps(), _exact())
        return cls(device, FastOps(), _exact(), partial(_free, device), partial(devices.ask, device))

    @property
    def shared(self) -> bool:
        """See ``Backend.shared``."""
        return self.free is not None

    def broken(self) -> str:
        """See ``Backend.broken``."""
        return devices.why_broken(self.device, self._ask)

    def current(self) -> contextlib.AbstractContextManager[object]:
        """See ``Backend.current``: each thread has a current GPU of its own."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext()

    def marks(self) -> tuple[str, ...]:
        """See ``Backend.marks``."""
        return (torch.__version__, *(self._ops[level.name].name for level in self.levels), *_marks(self.device))

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """See ``Backend.use``."""
        self._current.ops = self._ops[numerics.name]

    def linear(self, matrices: Many[torch.Tensor], bias: torch.Tensor | None, lora: Product | None) -> Projection:
        """See ``Backend.linear``."""
        return DeviceLinear(self._current, matrices, bias, lora)

    def take(self, adapter: Adapter) -> None:
        """See ``Backend.take``. At the exact level it is shown that no row of its products sees another one; kernels
        of its shapes are compiled then, and not in a step."""
        ops = self._current.ops
        try:
            with torch.inference_mode(), self.current():
                adapter.move(self.device)
                same = ops is self._ops[GPU_FAST.name] or alike(ops, adapter, self.device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{self.device} has no room for an adapter of {show_bytes(adapter.nbytes)}; free some of its memory, "
                "or ask for a GPU with more (gpu_memory=... in @model_function)"
            ) from error
        except ops.refusals as error:
            raise UnsupportedModel(
                f"the adapter cannot be computed on {self.device}: {type(error).__name__}: {error}"
            ) from error
        adapter.tile = TILE if same else 1

    def rms_norm(self, weight: torch.Tensor, eps: float, plus: float) -> Norm:
        """See ``Backend.rms_norm``."""
        return DeviceRmsNorm(self._current, weight, eps, plus)

    def layer_norm(self, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Norm:
        """See ``Backend.layer_norm``."""
        return DeviceLayerNorm(self._current, weight, bias, eps)

    def gate(self, name: str) -> Gate:
        """See ``Backend.gate``."""
        return ActivationGate(activation(name))

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
        self.use(numerics, dtype)
        kv = DeviceKv(shape, pages, dtype, self.device)
        return kv, DeviceSteps(kv, heads, numerics, self._ops[numerics.name], self.device)


def _exact() -> Ops | None:
    try:
        from sllm_runtime.worker.engine.ours.gpu.exact import ExactOps
    except ImportError as error:  # triton comes with torch for CUDA on Linux alone
        log.warning("there is no exact mode here, triton is missing: %s", error)
        return None
    return ExactOps()


def _free(device: torch.device) -> int:
    """What torch keeps for itself is given back first: the self-test used it."""
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def _marks(device: torch.device) -> tuple[str, ...]:
    if device.type != "cuda":
        return (str(device),)
    version = getattr(sys.modules.get("triton"), "__version__", "")  # imported where it computes
    found = torch.cuda.get_device_properties(device)
    driver = _DRIVER.read_text().partition("\n")[0] if _DRIVER.exists() else ""
    return (found.name, f"{found.major}.{found.minor}", str(torch.version.cuda), driver, version)
