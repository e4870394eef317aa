"""The arithmetic of exact mode on a GPU: Triton kernels with which a row's bits depend on that row alone.

Whether the hardware keeps what the kernels promise is for the self-test at a start to find out, as on a CPU. Nothing
imports this, and Triton with it, where there is no accelerator.
"""

from __future__ import annotations

from typing import Final

from triton.errors import TritonError

from sllm_runtime.worker.engine.ours.gpu import exact_attention, exact_linear, exact_norms
from sllm_runtime.worker.engine.ours.gpu.ops import Tensor

KERNELS: Final = (
    exact_linear.linear_kernel,
    exact_norms.rms_kernel,
    exact_norms.layer_kernel,
    exact_attention.write_kernel,
    exact_attention.attend_kernel,
)


def prime() -> None:
    """What Triton finds out before the first launch of a process, and a fork has from its parent: the hashes of itself,
    whose library has half a gigabyte, and of the kernels. Raises ``ImportError`` for a Triton that has no such thing:
    of the exact mode that is no part."""
    for kernel in KERNELS:
        hash(kernel)
    from triton.runtime.cache import triton_key

    triton_key()


class ExactOps:
    """See ``Ops``."""

    name: Final = "exact-triton"
    refusals: Final = (TritonError,)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Ops.linear``."""
        return exact_linear.linear(x, weight, bias)

    def linear_added(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        """See ``Ops.linear_added``; the sum is rounded once."""
        return exact_linear.linear(x, weight, bias, residual)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return exact_norms.rms_norm(x, scale, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """See ``Ops.layer_norm``."""
        return exact_norms.layer_norm(x, weight, bias, eps)

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        """See ``Ops.write_kv``."""
        exact_attention.write_kv(k, v, k_pages, v_pages, slots)

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, of: Tensor, positions: Tensor,
        scale: float, window: int, cap: float,
    ) -> Tensor:  # fmt: skip
        """See ``Ops.attend``."""
        return exact_attention.attend(q, k_pages, v_pages, tables, of, positions, scale, window, cap)
