"""Tensors by the names that transformers gives them; nothing is copied where memory allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from sllm_runtime.protocol.errors import InvalidCheckpoint
from sllm_runtime.worker.engine.ours.lora import Lora
from sllm_runtime.worker.engine.ours.model.backend import Backend

_SCALES: Final = ("scales", "weight_scale", "weight_scale_inv", "weight.absmax", "SCB")
"""What stands beside a matrix in the place of its ``weight``: GPTQ and AWQ, fp8, bitsandbytes."""


class Weights:
    """What a family reads. ``dtype`` is that of activations; ``backend`` makes parts of what is read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, backend: Backend) -> None:
        self._tensors = tensors
        self.dtype = dtype
        self.backend = backend
        self.lora = Lora(tensors, backend.device, backend.take)
        """What adapters add to the products that are made of these."""

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor ``name``. Raises ``InvalidCheckpoint`` if it is not there or has another shape."""
        try:
            found = self._tensors[name]
        except KeyError:
            stem, what = name.removesuffix("weight"), "convert the model that these weights belong to"
            if scale := next((stem + each for each in _SCALES if stem + each in self._tensors), ""):
                said = "so it is quantised, which config.json does not say"
                what = f"it has {scale!r}, {said}: deploy the weights it was made from"
            raise InvalidCheckpoint(f"the checkpoint lacks the tensor {name!r}; {what}", field=name) from None
        if tuple(found.shape) != shape:
            raise InvalidCheckpoint(
                f"tensor {name!r} has shape {tuple(found.shape)}, the model wants {shape}", field=name
            )
        return found


def side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of matrices that lie behind one another in memory, along dim 0; None where they do not.

    Checkpoints are in execution order, so the projections of attention and those of a gated MLP mostly do.
    """
    first = tensors[0]
    place = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and tensor.dtype == first.dtype
        if not same or not tensor.is_contiguous() or tensor.data_ptr() != place or tensor.shape[1:] != first.shape[1:]:
            return None
        place += tensor.nbytes
    rows = sum(tensor.shape[0] for tensor in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
