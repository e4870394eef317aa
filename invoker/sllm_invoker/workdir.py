"""A directory for each sandbox alone, removed with it; what a killed life left is removed at the next start."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path

log = logging.getLogger(__name__)


class Workdirs:
    """The work directories of one node, below ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def reset(self) -> None:
        """Remove all; called before the first instance."""
        shutil.rmtree(self._root, ignore_errors=True)
        self._root.mkdir(parents=True, mode=0o700)

    def make(self, instance: str) -> Path:
        """A new, empty directory of mode 0700."""
        path = self._root / instance
        path.mkdir(mode=0o700)
        return path

    async def remove(self, path: Path) -> None:
        """Remove ``path`` and all in it; what cannot be removed is logged."""

        def failed(_function: object, name: str, error: object) -> None:
            log.warning("%s cannot be removed: %s", name, error)

        def remove() -> None:
            shutil.rmtree(path, onerror=failed)

        await asyncio.to_thread(remove)
