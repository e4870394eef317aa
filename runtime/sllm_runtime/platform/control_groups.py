"""What the control groups of this process, of either version, leave it of the machine."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

CGROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
LIMITS: Final = ("memory.max", "memory.limit_in_bytes")
"""Of a group of version 2, and of one of version 1, whose number is past all memory where there is none."""
_GROUP: Final = re.compile(r"^\d+:([^:]*):/(.*)$", re.MULTILINE)


def groups(root: Path = CGROUPS, own: Path = OWN) -> list[Path]:
    """This process's control groups and those that they are in, each of which may have a limit; ``root``, which a
    container sees its own at, is the last. A systemd unit's is its own. Of version 1 those of memory and CPU, where the
    machine has these there."""
    try:
        said = _GROUP.findall(own.read_text())
    except OSError:
        said = []
    paths = {name: path for names, path in said for name in names.split(",")}
    split = [name for name in ("memory", "cpu") if name in paths and (root / name).is_dir()]
    return [each for name in (*split, "") for each in _within(root / name, paths.get(name, ""))]


def _within(mount: Path, path: str) -> list[Path]:
    group = mount / path
    return [*(each for each in (group, *group.parents) if each != mount and each.is_relative_to(mount)), mount]


def memory(within: Sequence[Path] = ()) -> int:
    """Bytes of memory this process may use: the machine's, cut by its control groups' limits."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in (group / name for group in within or groups() for name in LIMITS):
        with contextlib.suppress(OSError, ValueError):
            total = min(total, int(file.read_text()))
    return total
