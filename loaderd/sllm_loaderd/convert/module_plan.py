"""What a module says about its weights, as plain records: no torch is needed to work with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Fusion:
    """Source tensors that the module holds as one: ``parts`` one behind the other are its row-major bytes."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """Names are the module's. ``renamed``: module name of a source tensor, where the two differ."""

    order: tuple[str, ...]
    traced: bool
    ties: tuple[tuple[str, ...], ...] = ()
    """Groups of names of one tensor."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    fusions: tuple[Fusion, ...] = ()
