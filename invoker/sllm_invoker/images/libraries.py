"""Shared libraries that programs need from outside their own packages, as the dynamic loader finds them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Final

LDD_S: Final = 300.0
_FOUND: Final = re.compile(r"^\s+(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
CACHE: Final = Path("/etc/ld.so.cache")


def parse(text: str) -> frozenset[Path]:
    """Paths in what ``ldd`` says; what it has not found is left out, as is what the kernel itself provides."""
    return frozenset(Path(path) for path in _FOUND.findall(text))


def needed_by(programs: Iterable[Path]) -> frozenset[Path]:
    """Libraries that are mapped with any of ``programs``. Raises ``OSError`` without ``ldd``."""
    words = ["ldd", *map(str, programs)]
    # Its exit status is 1 as soon as one of them is no dynamic program.
    said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LDD_S, check=False)
    return parse(said.stdout)
