"""A disk of one speed: the kernel gives a process only so many bytes per second of it (cgroups v1, ``blkio.throttle``).

A disk that a machine shares with others has another speed every few minutes, which no expectation foresees. Held below
the least of them it has one, within a few ms, and what is left of an error is the estimator's own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

CONTROLLER: Final = Path("/sys/fs/cgroup/blkio")
_PROCS: Final = "cgroup.procs"
_READ: Final = "blkio.throttle.read_bps_device"
_BLOCK: Final = Path("/sys/dev/block")


def missing(directory: Path) -> str:
    """Why it cannot be done for the disk that ``directory`` is on; empty if it can."""
    if not os.access(CONTROLLER / _READ, os.F_OK):
        return "cgroups v1 with the blkio controller are not mounted here"
    if not os.access(CONTROLLER / _PROCS, os.W_OK):
        return "only root may make a cgroup"
    try:
        device(directory)
    except OSError as error:
        return f"{directory} is on no block device: {error}"
    return ""


def device(directory: Path) -> str:
    """``major:minor`` of the whole disk that ``directory`` is on. Raises ``OSError``."""
    number = directory.stat().st_dev
    there = (_BLOCK / f"{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    whole = there.parent if (there / "partition").exists() else there
    return (whole / "dev").read_text().strip()


@contextlib.contextmanager
def throttled(pid: int, directory: Path, bytes_per_s: int) -> Iterator[None]:
    """Process ``pid`` reads the disk of ``directory`` no faster meanwhile. Raises ``OSError``."""
    before = _group(pid)
    group = before / f"sllm-steady-{os.getpid()}"
    group.mkdir()
    try:
        (group / _READ).write_text(f"{device(directory)} {bytes_per_s}")
        (group / _PROCS).write_text(str(pid))
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (before / _PROCS).write_text(str(pid))
    finally:
        group.rmdir()


def _group(pid: int) -> Path:
    """The one it is in."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return CONTROLLER / path.lstrip("/")
    raise FileNotFoundError(f"process {pid} is in no cgroup of the blkio controller")
