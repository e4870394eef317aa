"""What workers found out about their engine's numerics, kept for the next start of the same version on this node.

A worker's word is kept for its own version alone, and the worker that gets it back checks that it is for the same
libraries, processor, threads and weights, so no function can speak for another.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from pathlib import Path
from typing import Final

from sllm_runtime.protocol.limits import MAX_PROOF
from sllm_runtime.protocol.node import StartInstance

log = logging.getLogger(__name__)
_MOST: Final = 256


class Proofs:
    """At most 256 of them, the least recently used dropped first; below ``folder``, or in memory without one."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._known: OrderedDict[str, str] = OrderedDict()
        if folder is not None:
            for path in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime):
                self._known[path.stem] = path.read_text(errors="replace")[:MAX_PROOF]

    def get(self, order: StartInstance) -> str:
        """The proof of an earlier start of this version; empty: none."""
        key = _key(order)
        if key in self._known:
            self._known.move_to_end(key)
        return self._known.get(key, "")

    def keep(self, order: StartInstance, proof: str) -> None:
        """Remember what a worker of this version said. What is too long to be one is no proof."""
        key = _key(order)
        if not proof or len(proof) > MAX_PROOF or self._known.get(key) == proof:
            return
        self._known[key] = proof
        self._write(key, proof)
        while len(self._known) > _MOST:
            dropped, _ = self._known.popitem(last=False)
            if self._folder is not None:
                (self._folder / f"{dropped}.json").unlink(missing_ok=True)

    def _write(self, key: str, proof: str) -> None:
        if self._folder is None:
            return
        path = self._folder / f"{key}.json"
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            whole = path.with_suffix(".new")
            whole.write_text(proof)
            os.replace(whole, path)
        except OSError as error:  # a full disk costs the next start a self-test, and nothing else
            log.warning("%s cannot be written: %s", path, error)


def _key(order: StartInstance) -> str:
    model = order.model.digest if order.model is not None else ""
    parts = (order.function, str(order.version), order.bundle, model)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
