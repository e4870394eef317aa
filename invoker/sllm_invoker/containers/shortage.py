"""Whether a container has come to its memory limit: what its control group says, of both versions, and what follows.

Who needs more than there is may fall silent before the kernel ends it: with nothing left but the pages of its own
programs, it reads these again and again, and each try to find room takes longer than a sign of life may.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sllm_invoker.containers.control_group import Controller
from sllm_runtime.platform import oom_kills

NEAR: Final = 0.9
"""Of the limit. The rest are pages that it cannot do without: those of the programs that it runs."""


@dataclass(frozen=True)
class Memory:
    """What a control group has. Bytes, and counts since it was made."""

    limit: int
    used: int
    files: int
    """Of ``used``, what the kernel can take back at any time: pages of files. Not /tmp nor shared memory."""
    refused: int
    """Times that there was no room below the limit until the kernel had taken something back."""
    ends: int
    """Times that nothing was left to be taken back."""


def exhausted(memory: Memory) -> bool:
    """Whether it has used up what it may have. Files alone never fill a group: they make room."""
    full = memory.used - memory.files >= NEAR * memory.limit
    return memory.ends > 0 or (memory.refused > 0 and full)


def read(controller: Controller) -> Memory | None:
    """What the group has now; None where that is not told, or where it has no limit."""
    try:
        return _unified(controller) if controller.unified else _split(controller)
    except (OSError, ValueError, KeyError):
        return None


def _unified(controller: Controller) -> Memory:
    stat, events = _table(controller, "memory.stat"), _table(controller, oom_kills.UNIFIED)
    return Memory(
        limit=_number(controller, "memory.max"),
        used=_number(controller, "memory.current"),
        files=stat["active_file"] + stat["inactive_file"],
        refused=events["max"],
        ends=events["oom"],
    )


def _split(controller: Controller) -> Memory:
    stat, control = _table(controller, "memory.stat"), _table(controller, oom_kills.SPLIT)
    return Memory(
        limit=_number(controller, "memory.limit_in_bytes"),
        used=_number(controller, "memory.usage_in_bytes"),
        files=stat["total_active_file"] + stat["total_inactive_file"],
        refused=_number(controller, "memory.failcnt"),
        ends=control["under_oom"] + control.get("oom_kill", 0),
    )


def _number(controller: Controller, name: str) -> int:
    """Of a file that holds one; ``max``, no limit, is none."""
    return int((controller.directory / name).read_text())


def _table(controller: Controller, name: str) -> dict[str, int]:
    """Of a file with a name and a number in each line."""
    lines = (controller.directory / name).read_text().splitlines()
    return {key: int(value) for key, _, value in (line.partition(" ") for line in lines)}
