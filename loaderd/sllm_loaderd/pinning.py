"""Chunks that the devices of this node know, so that copies from them need no staging."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from sllm_loaderd.chunk import Chunk
from sllm_runtime.protocol.errors import Unavailable

log = logging.getLogger(__name__)


class Pinner(Protocol):
    """Whoever wants to know host memory before it is copied from: the devices of this node."""

    def register(self, address: int, nbytes: int) -> None:
        """Pin it. Raises ``Unavailable``."""

    def unregister(self, address: int) -> None:
        """Unpin it, before it is unmapped."""


class Pinning:
    """Pins each chunk once, for as long as it lives. Thread-safe. None: no device wants to know."""

    def __init__(self, pinner: Pinner | None) -> None:
        self._pinner = pinner
        self._refused = False
        self._lock = threading.Lock()

    def pin(self, chunk: Chunk) -> None:
        """What cannot be pinned is copied more slowly, and said once."""
        if self._pinner is None or chunk.adopted:
            return
        with self._lock:
            if not (self._refused or chunk.pinned):
                try:
                    self._pinner.register(chunk.address, chunk.size)
                    chunk.pinned = True
                except Unavailable as error:
                    log.warning("chunks are copied to devices without being pinned: %s", error)
                    self._refused = True  # what is pinned is unpinned all the same

    def unpin(self, chunk: Chunk) -> None:
        """Before it is unmapped."""
        if chunk.pinned and self._pinner is not None:
            self._pinner.unregister(chunk.address)
