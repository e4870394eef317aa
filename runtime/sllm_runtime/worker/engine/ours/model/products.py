"""How the products of a model are computed in the current step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from sllm_runtime.worker.engine.ours.model import slabs
from sllm_runtime.worker.engine.ours.model.tiled import Scratch
from sllm_runtime.worker.engine.ours.numerics import Numerics


@dataclass(slots=True)
class Products:
    """What a level, a dtype and the threads allow; one for each model."""

    slabs: bool = False
    tiles: bool = False
    """Those of ``tiled``, where a matrix has them."""
    scratch: Scratch = field(default_factory=Scratch)

    def use(self, numerics: Numerics, dtype: torch.dtype) -> None:
        """Slabs in float32, where the level has them (of OpenBLAS' own threads there is one); tiles in bfloat16,
        whatever the level. Both compute by one thread."""
        alone = torch.get_num_threads() == 1
        self.slabs = alone and numerics.slabs and dtype == torch.float32 and slabs.available()
        self.tiles = alone and dtype == torch.bfloat16
