"""Where models come from. A source is one file: it says what is there, and brings it to a local directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from sllm_runtime.protocol.errors import InvalidCheckpoint

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


class Source(Protocol):
    """A model at a URI. Blocking calls."""

    def fingerprint(self) -> str:
        """Changes when the content does; cheap: no weights are read. Raises typed errors if it is not there."""

    def fetch(self, cache: Path, progress: Progress | None = None) -> Path:
        """A local directory with the model's files, brought to ``cache`` if they are not local already."""


def open_source(uri: str) -> Source:
    """The source for ``uri``: a directory, ``hf://org/name[@revision]`` or ``s3://bucket/prefix``.

    Raises ``InvalidCheckpoint`` for what is none of these.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme == "file":
        from sllm_loaderd.sources.directory import DirectorySource

        return DirectorySource(Path(rest if separator else uri))
    if scheme == "hf":
        from sllm_loaderd.sources.hub import HubSource

        return HubSource(rest)
    if scheme == "s3":
        from sllm_loaderd.sources.s3 import S3Source

        return S3Source(rest)
    raise InvalidCheckpoint(
        f"{uri!r} is no model source; give a directory, hf://org/name@revision or s3://bucket/prefix", field="model"
    )


def resolve(uri: str, cache_dir: Path, progress: Progress | None = None) -> Path:
    """The local directory of the model at ``uri``, fetched to ``cache_dir`` if need be."""
    return open_source(uri).fetch(cache_dir, progress)
