"""A directory that goes away with those who use it, however they end."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_GONE_S: Final = 10.0
# Waits for the end of its stdin: then nobody holds the other end. What was killed may still write for a moment.
_GUARD: Final = """
import os, shutil, sys, time
sys.stdin.buffer.read()
for _ in range(50):
    shutil.rmtree(sys.argv[1], ignore_errors=True)
    if not os.path.exists(sys.argv[1]):
        break
    time.sleep(0.1)
"""


@dataclass(frozen=True)
class Scratch:
    """The directory, and the descriptor to pass to processes that it must outlive."""

    path: Path
    held: int


@contextlib.contextmanager
def scratch(prefix: str) -> Iterator[Scratch]:
    """A new directory below TMPDIR, removed when the block is left.

    If this process is killed instead, a small process in a session of its own removes it as soon as all who inherited
    ``held`` have ended too. Raises ``OSError``.
    """
    path = Path(tempfile.mkdtemp(prefix=prefix))
    read, held = os.pipe()
    try:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _GUARD, str(path)],
            stdin=read, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(read)
    with guard:
        try:
            yield Scratch(path, held)
        finally:
            os.close(held)
            try:
                guard.wait(_GONE_S)
            except subprocess.TimeoutExpired:  # somebody who inherited it goes on; the block is left all the same
                guard.kill()
                shutil.rmtree(path, ignore_errors=True)
