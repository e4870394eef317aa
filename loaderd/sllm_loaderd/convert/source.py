"""What a source format offers to the converter. One file per format implements it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from sllm_runtime.protocol.errors import InvalidCheckpoint


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor as the source names it. ``position`` orders the tensors as they stand in the files."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    position: tuple[int, int]


class TensorSource(Protocol):
    """Raw row-major bytes of named tensors. Owned by who opened it, who closes it."""

    @property
    def tensors(self) -> Mapping[str, SourceTensor]:
        """Every tensor, ties excluded."""

    @property
    def ties(self) -> Mapping[str, str]:
        """Other names of a tensor, as far as the format itself knows them."""

    def read(self, name: str, start: int, view: memoryview) -> None:
        """Fill ``view`` with the bytes of ``name`` from ``start`` on. Raises ``InvalidCheckpoint``."""

    def close(self) -> None:
        """Give back descriptors and mappings; repeatable."""


def source_files(directory: Path) -> tuple[str, list[Path]]:
    """Which format a Hugging Face directory has (``safetensors`` or ``torch``) and its weight files, or index file.

    Raises ``InvalidCheckpoint`` if there are no weights.
    """
    if not directory.is_dir():
        raise InvalidCheckpoint(f"{directory} is no directory; give the directory that holds config.json and weights")
    names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    for kind, suffix, stem in (("safetensors", ".safetensors", "model"), ("torch", ".bin", "pytorch_model")):
        index = f"{stem}{suffix}.index.json"
        if index in names:
            return kind, [directory / index]
        if f"{stem}{suffix}" in names:
            return kind, [directory / f"{stem}{suffix}"]
        weights = [name for name in names if name.endswith(suffix) and not name.startswith(("optimizer", "training"))]
        if weights:
            return kind, [directory / name for name in weights]
    raise InvalidCheckpoint(
        f"{directory} has no weights: neither *.safetensors nor pytorch_model*.bin; it has {names[:8]}"
    )
