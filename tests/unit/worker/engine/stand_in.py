"""An accelerator's path through our engine over tensors on the CPU: every line but the kernels and CUDA's own calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from sllm_runtime.worker.engine.ours.engine import OurEngine
from sllm_runtime.worker.engine.ours.gpu.device import Device
from sllm_runtime.worker.engine.ours.gpu.fast_ops import FastOps
from sllm_runtime.worker.engine.ours.gpu.graphs import Compute, Computed, Recorder
from sllm_runtime.worker.engine.ours.gpu.ops import Ops, Tensor
from sllm_runtime.worker.engine.ours.gpu.runner import DeviceRunner
from sllm_runtime.worker.engine.ours.model import build
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import EXACT, GPU_EXACT, GPU_FAST, Numerics
from sllm_runtime.worker.engine.ours.pages import pages_for
from sllm_runtime.worker.engine.ours.scheduler import Chunk, Limits
from sllm_runtime.worker.engine.ours.scheduler import Sequence as Running
from tests.fixtures.families import family
from tests.unit.worker.engine.driver import MIB, request

CPU = torch.device("cpu")


def rows_of(x: Tensor) -> list[Tensor]:
    """Each as a matrix of one row."""
    return [x[at : at + 1] for at in range(len(x))]


class RowByRow:
    """Exact operators without a kernel of their own: each row is computed by itself, by torch's."""

    name = "row-by-row"
    refusals: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self._fast = FastOps()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.cat([self._fast.linear(row, weight, bias) for row in rows_of(x)])

    def linear_added(self, x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
        return residual + self.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, scale: Tensor, eps: float) -> Tensor:
        return torch.cat([self._fast.rms_norm(row, scale, eps) for row in rows_of(x)])

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return torch.cat([self._fast.layer_norm(row, weight, bias, eps) for row in rows_of(x)])

    def write_kv(self, k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
        self._fast.write_kv(k, v, k_pages, v_pages, slots)

    def attend(
        self, q: Tensor, k_pages: Tensor, v_pages: Tensor, tables: Tensor, of: Tensor, positions: Tensor,
        scale: float, window: int, cap: float,
    ) -> Tensor:  # fmt: skip
        seen = []
        for row, number, position in zip(q, of.tolist(), positions.tolist(), strict=True):
            keys, values = (
                pages[tables[number].long()].transpose(0, 1).flatten(1, 2)[:, : position + 1].float()
                for pages in (k_pages, v_pages)
            )
            asked = row.float().view(len(keys), -1, row.shape[-1])
            scores = asked @ keys.transpose(1, 2) * scale
            scores = torch.tanh(scores / cap) * cap if cap else scores
            if window:
                scores[..., : max(0, position + 1 - window)] = float("-inf")
            seen.append((torch.softmax(scores, -1) @ values).reshape(row.shape).to(row.dtype))
        return torch.stack(seen)


class Again:
    """A recorder that computes anew, into the memory of the first time: as a graph does, kernel by kernel."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, compute: Compute) -> tuple[Computed, Callable[[], None]]:
        computed = compute()

        def replay() -> None:
            self.replays += 1
            found = compute()
            computed.hidden.copy_(found.hidden)
            assert computed.logits is not None
            assert found.logits is not None
            assert computed.best is not None
            assert found.best is not None
            computed.logits.copy_(found.logits)
            computed.best.copy_(found.best)

        return computed, replay


def decoder(name: str, dtype: torch.dtype = torch.float32, exact: Ops | None = None) -> Decoder:
    """Ours over the weights of transformers' model, as an accelerator has them."""
    model: Any = family(name, dtype)
    backend = Device(CPU, FastOps(), exact)
    return build(type(model).__name__, model.config, model.state_dict(), dtype, EXACT.rows, backend)


class DeviceRows:
    """Computes chunks of one sequence and gives the logits of every row; see ``driver.Rows``."""

    def __init__(self, model: Decoder, tokens: Sequence[int], numerics: Numerics) -> None:
        pages = pages_for(len(tokens))
        shape = model.backend.kv_shape(model.count, model.heads, model.dtype)
        self._model = model
        _, self._steps = model.backend.cache(shape, pages, model.heads, numerics, model.dtype)
        self._sequence = Running(request(0, tokens), list(tokens), pages=list(range(pages))[::-1])

    def chunk(self, start: int, count: int) -> torch.Tensor:
        with torch.inference_mode():
            batch = self._steps.make([Chunk(self._sequence, start, count)])
            hidden = self._model.run(self._model.begin(batch), batch, 0, self._model.count)
            return self._model.logits(hidden, torch.arange(count, device=hidden.device))


def engine_of(
    made: Decoder, numerics: Numerics, *, kv: int = 2 * MIB, proven: bool = False, record: Recorder | None = None,
    **limits: int,
) -> OurEngine:  # fmt: skip
    assert isinstance(made.backend, Device)
    runner = DeviceRunner(made, made.backend, numerics, record=record)
    return OurEngine(made, frozenset(), numerics, kv, proven=proven, limits=Limits(**limits), runner=runner)


def fast(name: str = "llama", **options: Any) -> OurEngine:
    return engine_of(decoder(name), GPU_FAST, **options)


def exact(name: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> OurEngine:
    return engine_of(decoder(name, dtype, RowByRow()), GPU_EXACT, proven=True, **options)
