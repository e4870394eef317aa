"""How the products of a model are computed in the current step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sllm_runtime.worker.engine.ours.model import slabs
from sllm_runtime.worker.engine.ours.model.compiled import Scratch
from sllm_runtime.worker.engine.ours.numerics import Numerics


@dataclass(slots=True)
class Products:
    """What a level, a dtype and the threads allow; one for each model."""

    slabs: bool = False
    compiled: bool = False
    """By kernels of our own, for matrices that these take; before all others."""
    scratch: Scratch = field(default_factory=Scratch)

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """Kernels of our own compute by one thread, and so do slabs: of OpenBLAS' own threads there is one. They are
        of use in float32, where the level has them."""
        alone = torch.get_num_threads() == 1
        self.slabs = alone and numerics.slabs and dtype == torch.float32 and slabs.available()
        self.compiled = alone
