"""Rotary positions: frequencies as transformers computes them for each kind of scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from sllm_runtime.protocol.errors import UnsupportedModel
from sllm_runtime.worker.engine.ours.batch import Turn

SCALINGS = frozenset({"yarn", "dynamic", "longrope"})
"""Those that transformers computes."""


class Rope:
    """Rotates the first ``rotated`` numbers of each head by the row's position."""

    def __init__(self, config: Any, width: int, layer_type: str | None = None) -> None:
        parameters: Mapping[str, Any] = config.rope_parameters
        if layer_type is not None:
            parameters = parameters[layer_type]
        kind = parameters.get("rope_type", "default")
        self.rotated = int(width * parameters.get("partial_rotary_factor", 1.0))
        self._frequencies, self._factor = self._plain(parameters), 1.0
        if kind == "linear":
            self._frequencies = self._frequencies / parameters["factor"]
        elif kind == "llama3":
            self._frequencies = _llama3(self._frequencies, parameters)
        elif kind in SCALINGS:
            self._frequencies, self._factor = _scaled(config, kind, layer_type)
        elif kind != "default":
            raise UnsupportedModel(f"rope scaling {kind!r} is unknown to this engine")
        self._rest = width - self.rotated

    def move(self, device: torch.device) -> None:
        """Rotate what is there."""
        self._frequencies = self._frequencies.to(device)

    def _plain(self, parameters: Mapping[str, Any]) -> torch.Tensor:
        steps = torch.arange(0, self.rotated, 2, dtype=torch.float32) / self.rotated
        found: torch.Tensor = 1.0 / (parameters["rope_theta"] ** steps)
        return found

    def turn(self, positions: torch.Tensor) -> Turn:
        """Of a step's rows."""
        angles = positions.unsqueeze(1).float() * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._factor != 1.0:
            cos, sin = cos * self._factor, sin * self._factor
        # A head's rest keeps cos 1, sin 0.
        cos, sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)
        if self._rest:
            cos = torch.nn.functional.pad(cos, (0, self._rest), value=1.0)
            sin = torch.nn.functional.pad(sin, (0, self._rest))
        return Turn(self.rotated // 2, cos.unsqueeze(1), sin.unsqueeze(1))


def _llama3(frequencies: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Slow waves are stretched by a factor, fast ones stay, those between are mixed."""
    factor, length = parameters["factor"], parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    waves = 2 * math.pi / frequencies
    slow, fast = waves > length / low, waves < length / high
    stretched = torch.where(slow, frequencies / factor, frequencies)
    share = (length / waves - low) / (high - low)
    mixed = (1 - share) * stretched / factor + share * stretched
    return torch.where(~slow & ~fast, mixed, stretched)


def _scaled(config: Any, kind: str, layer_type: str | None) -> tuple[torch.Tensor, float]:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    options: dict[str, Any] = {} if layer_type is None else {"layer_type": layer_type}
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    return frequencies.float(), float(factor)


def context(config: Any, most: int) -> int:
    """Positions whose rotation does not depend on how long the text becomes: scalings that change with the length
    (dynamic, longrope) are used up to where they change, since a KV cache cannot follow them."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "longrope":
        return min(most, int(parameters.get("original_max_position_embeddings") or most))
    return most
