"""Source: a directory on this machine, or one GGUF file."""

from __future__ import annotations

import errno
import hashlib
from pathlib import Path

from sllm_loaderd.disk.local import LocalFile
from sllm_loaderd.files import gguf_parts, require_own
from sllm_loaderd.sources import Entry
from sllm_loaderd.sources.attempts import changed
from sllm_loaderd.sources.listing import wanted
from sllm_runtime.protocol.errors import ModelNotFound
from sllm_runtime.protocol.loader import DISK


class DirectorySource:
    """A local directory or GGUF file, taken where it stands."""

    path = DISK

    def __init__(self, path: Path) -> None:
        self._path = path.expanduser()
        self.uri = str(path)

    def fingerprint(self) -> str:
        """Names, sizes and times of its files."""
        digest = hashlib.sha256()
        for entry in self._files():
            if entry.is_file():
                stat = entry.stat()
                digest.update(f"{entry.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return f"files:{digest.hexdigest()}"

    def local(self) -> Path | None:
        return self._existing()

    def entries(self) -> list[Entry]:
        files = [path for path in self._files() if wanted(path.name) and path.is_file()]
        return [Entry(path.name, (stat := path.stat()).st_size, str(stat.st_mtime_ns)) for path in files]

    def open(self, entry: Entry) -> LocalFile:
        place = self._existing()
        file = (place if place.is_dir() else place.parent) / entry.name
        opened = LocalFile(file)
        try:
            require_own(opened.fileno(), file)
        except BaseException:
            opened.close()
            raise
        if (opened.nbytes, str(opened.modified_ns)) != (entry.nbytes, entry.etag):
            opened.close()
            raise changed(opened.name, "its size or its time is another one")
        return opened

    def close(self) -> None:
        """Nothing is held."""

    def _files(self) -> list[Path]:
        place = self._existing()
        return sorted(place.iterdir()) if place.is_dir() else gguf_parts(place)

    def _existing(self) -> Path:
        try:
            there = self._path.is_dir() or (self._path.suffix == ".gguf" and self._path.is_file())
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            there = False  # no other node can have it either
        if not there:
            raise ModelNotFound(f"model directory {self._path} is not there on this node", field="model")
        return self._path
