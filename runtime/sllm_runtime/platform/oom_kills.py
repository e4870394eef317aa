"""What the kernel says it has killed for lack of memory: one line, in each of the files that count it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from sllm_runtime.platform.control_groups import CGROUPS, OWN

UNIFIED: Final = "memory.events"
SPLIT: Final = "memory.oom_control"
"""In the directory of a control group, of version 2 and 1."""
MACHINE: Final = Path("/proc/vmstat")
_LINE: Final = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)
_GROUP: Final = re.compile(r"^(\d+):([^:]*):/(.*)$", re.MULTILINE)


def counted(file: Path) -> int | None:
    """The count that stands in ``file``; None where there is none."""
    try:
        found = _LINE.search(file.read_text())
    except OSError:
        return None
    return int(found[1]) if found else None


def of_group(root: Path = CGROUPS) -> int | None:
    """Processes of the control group that is mounted at ``root`` (a container sees its own there)."""
    files = (root / UNIFIED, root / "memory" / SPLIT)
    return next((count for file in files if (count := counted(file)) is not None), None)


def nearest(root: Path = CGROUPS, own: Path = OWN, machine: Path = MACHINE) -> int:
    """Processes of this process's own control group; where that is not told, of the whole machine; else 0."""
    try:
        groups = _GROUP.findall(own.read_text())
    except OSError:
        groups = []
    files = [root / group / UNIFIED for number, _, group in groups if number == "0"]
    files += [root / "memory" / group / SPLIT for _, names, group in groups if "memory" in names.split(",")]
    return next((count for file in (*files, machine) if (count := counted(file)) is not None), 0)
