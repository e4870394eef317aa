"""Which processes have chunks mapped or open: the proof that an orphaned sandbox is dead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from sllm_loaderd.chunk import MEMFD_NAME

_MARK: Final = f"/memfd:{MEMFD_NAME}"


def used_inodes() -> set[int] | None:
    """Inodes of chunks that a process other than this one maps or has open. Blocking: reads /proc once.

    None if a process that is younger than this one, and so may be a sandbox, cannot be looked into: then nothing is
    proven.
    """
    found: set[int] = set()
    born = _born(str(os.getpid()))
    for pid in (name for name in os.listdir("/proc") if name.isdigit()):
        if int(pid) == os.getpid():
            continue
        try:
            found |= _mapped(pid) | _open(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        except PermissionError:
            if _born(pid) >= born:
                return None
    return found


def _born(pid: str) -> int:
    """When a process began, in clock ticks since boot; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return 0


def _mapped(pid: str) -> set[int]:
    lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    return {int(line.split()[4]) for line in lines if _MARK in line}


def _open(pid: str) -> set[int]:
    inodes = set()
    with os.scandir(f"/proc/{pid}/fd") as entries:
        for entry in entries:
            try:
                if os.readlink(entry.path).startswith(_MARK):
                    inodes.add(os.stat(entry.path).st_ino)
            except FileNotFoundError:
                continue
    return inodes
