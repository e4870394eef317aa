"""What attention is told: heads, and how a layer looks. It is computed by ``kernels.attention`` on a CPU, by
``gpu.exact_attention`` or ``gpu.fast`` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads, width of each."""

    queries: int
    kv: int
    width: int

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.queries // self.kv


@dataclass(frozen=True, slots=True)
class Look:
    """How a layer looks: ``scale`` of the scores, ``window`` of positions (0: all before), ``cap``: scores are bent
    below it by tanh (0: they are not)."""

    scale: float
    window: int = 0
    cap: float = 0.0
