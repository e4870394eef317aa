"""A slower disk: the kernel's own limit on what a group of processes reads from a block device (cgroup v1 or v2)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.programs import ProgramFailed

_ROOTS: Final = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
_BLKIO: Final = Path("/sys/fs/cgroup/blkio")


@dataclass(frozen=True)
class Limiter:
    """A hierarchy that can limit reads: where its groups are made, and the file and words of a limit."""

    root: Path
    file: str
    line: str
    """With ``{device}`` and ``{rate}``, bytes a second."""


V2: Final = "io.max", "{device} rbps={rate}"
V1: Final = "blkio.throttle.read_bps_device", "{device} {rate}"


def limiter(roots: tuple[Path, ...] = _ROOTS, blkio: Path = _BLKIO) -> Limiter:
    """What this machine has. Raises ``ProgramFailed`` if nothing here limits what is read."""
    for root in roots:
        enabled = root / "cgroup.subtree_control"
        if enabled.is_file() and "io" in enabled.read_text().split():
            return Limiter(root, *V2)
    if (blkio / V1[0]).is_file():
        return Limiter(blkio, *V1)
    raise ProgramFailed("no cgroup here limits reads: neither `io` of version 2 is on at the root nor `blkio` there")


def device_of(path: Path) -> str:
    """``major:minor`` of the whole disk that a file is on. Raises ``ProgramFailed`` for what is on none."""
    number = os.stat(path).st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        raise ProgramFailed(f"{path} is on no block device of its own, so its reads cannot be limited")
    if (device / "partition").exists():
        device = device.resolve().parent
    return (device / "dev").read_text().strip()


@contextlib.contextmanager
def throttled(path: Path, rate: int, others: Sequence[int] = (), *, own: bool = True) -> Iterator[None]:
    """This process (unless ``own`` is false), ``others`` (their ids), and what they start meanwhile, together read at
    most ``rate`` bytes a second from the disk that ``path`` is on. Raises ``ProgramFailed`` where that may not be
    had."""
    found, pids = limiter(), (*((os.getpid(),) if own else ()), *others)
    group = found.root / f"benchmark-{os.getpid()}"
    try:
        group.mkdir(exist_ok=True)
    except OSError as error:
        raise ProgramFailed(f"no group in {found.root}: {error.strerror}; limits want root") from error
    try:
        before = _group_of(pids[0], found.root)
        (group / found.file).write_text(found.line.format(device=device_of(path), rate=rate))
        try:
            for each in pids:
                (group / "cgroup.procs").write_text(str(each))
            yield
        finally:
            for member in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(ProcessLookupError):  # it has ended
                    (before / "cgroup.procs").write_text(member)
    except OSError as error:
        raise ProgramFailed(f"reads cannot be limited by {group / found.file}: {error.strerror}") from error
    finally:
        group.rmdir()


def _group_of(pid: int, root: Path) -> Path:
    """The group of that hierarchy in which a process is."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if (root.name in controllers.split(",")) if controllers else root in _ROOTS:
            return root / path.lstrip("/")
    raise ProgramFailed(f"process {pid} is in no group of {root}")
