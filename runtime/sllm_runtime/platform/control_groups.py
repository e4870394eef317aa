"""What the control groups (version 2) of this process leave it of the machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
_UNIFIED: Final = re.compile(r"^0::/(.*)$", re.MULTILINE)


def groups(root: Path = CGROUPS, own: Path = OWN) -> list[Path]:
    """This process's control group (version 2) and those that it is in, each of which may have a limit; ``root``, which
    a container sees its own at, is the last. A systemd unit's is its own."""
    try:
        found = _UNIFIED.search(own.read_text())
    except OSError:
        found = None
    group = root / found[1] if found else root
    return [*(each for each in (group, *group.parents) if each != root and each.is_relative_to(root)), root]


def memory(within: Sequence[Path] = ()) -> int:
    """Bytes of memory this process may use: the machine's, cut by its control groups' limits."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in within or groups():
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int((group / "memory.max").read_text()))
    return total
