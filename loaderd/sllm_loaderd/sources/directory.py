"""Source: a directory on this machine."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sllm_loaderd.sources import Progress
from sllm_runtime.protocol.errors import ModelNotFound


class DirectorySource:
    """A local directory, taken where it stands."""

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()

    def fingerprint(self) -> str:
        """Names, sizes and times of its files."""
        digest = hashlib.sha256()
        for entry in sorted(self._existing().iterdir()):
            if entry.is_file():
                stat = entry.stat()
                digest.update(f"{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return f"files:{digest.hexdigest()}"

    def fetch(self, cache: Path, progress: Progress | None = None) -> Path:
        """The directory itself."""
        return self._existing()

    def _existing(self) -> Path:
        if not self._path.is_dir():
            raise ModelNotFound(f"model directory {self._path} is not there on this node", field="model")
        return self._path
