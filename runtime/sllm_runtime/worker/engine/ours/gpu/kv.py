"""Where K and V lie on an accelerator: pages of the model's dtype, each KV head's places one after the other."""

from __future__ import annotations

import torch

from sllm_runtime.protocol.errors import OutOfMemory
from sllm_runtime.worker.engine.ours.kv import KvShape
from sllm_runtime.worker.engine.ours.pages import PAGE


class DeviceKv:
    """``pages`` pages and one more, into which rows that pad a step write. Raises ``OutOfMemory``."""

    def __init__(self, shape: KvShape, pages: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pages = pages
        size = (2, shape.layers, pages + 1, shape.heads, PAGE, shape.width)
        try:
            self._both = torch.zeros(size, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(
                f"{device} has no room for a KV cache of {pages} pages of {shape.page_bytes} bytes; free some of its "
                "memory, or ask for a GPU with more (gpu_memory=... in @model_function)"
            ) from error
        self._pairs = list(zip(self._both[0], self._both[1], strict=True))
        self._used: set[int] = set()

    def layer(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V (pages + 1, heads, PAGE, width) of a layer, counted in the stage."""
        return self._pairs[number]

    def clear(self, page: int) -> None:
        """See ``Kv.clear``; one that nobody had is zero, and is not touched."""
        if page in self._used:
            self._both[:, :, page].zero_()
        self._used.add(page)

    def read(self, page: int) -> torch.Tensor:
        """See ``Kv.read``: (2, layers, heads, PAGE, width)."""
        return self._both[:, :, page].to("cpu", copy=True)

    def fill(self, page: int, content: torch.Tensor) -> None:
        """See ``Kv.fill``."""
        into = self._both[:, :, page]
        if content.shape != into.shape or content.dtype != into.dtype:
            raise ValueError(f"a page is {into.dtype} {tuple(into.shape)}, not {content.dtype} {tuple(content.shape)}")
        self._used.add(page)
        into.copy_(content)
