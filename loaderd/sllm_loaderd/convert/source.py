"""What a source format offers to the converter. One file per format implements it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from sllm_runtime.protocol.checkpoint import AdapterRecord, QuantRecord


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as the source names it. ``position`` orders the tensors as they stand in the files; ``granule`` is
    ``PlannedTensor``'s."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    position: tuple[int, int]
    granule: int = 1


@dataclass(frozen=True, slots=True)
class SourceExtras:
    """What a format knows beyond its tensors: small files derived from it (but for config.json, one of that name in the
    directory wins), what packed tensors hold, and of which model it is an adapter."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    quants: tuple[QuantRecord, ...] = ()
    adapter: AdapterRecord | None = None


class TensorSource(Protocol):
    """Raw row-major bytes of named tensors. Owned by who opened it, who closes it."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor, ties excluded."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Other names of a tensor, as far as the format itself knows them."""

    @property
    def extras(self) -> SourceExtras:
        """What else there is to say."""

    def read(self, name: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``name`` from ``start`` on. Raises ``InvalidCheckpoint``."""

    def close(self) -> None:
        """Give back descriptors and mappings; repeatable."""
