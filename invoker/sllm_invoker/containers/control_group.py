"""A container's control group, which the invoker writes to itself: an engine's `update` does the same in 0.1 s of a
process of its own. Both versions of control groups, and machines that have a part of each.

Nothing is written to but the group that bears the container's own id.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from sllm_runtime.protocol.errors import Unavailable

PERIOD_US: Final = 100_000
"""Of the CPU quota, as engines set it."""
_ID: Final = re.compile(r"[0-9a-f]{64}")
_SCOPE: Final = ".scope"


@dataclass(frozen=True)
class Controller:
    """Where one controller has the container."""

    directory: Path
    unified: bool
    """Version 2."""


@dataclass(frozen=True)
class Group:
    """The control group files of one container."""

    memory: Controller
    cpu: Controller
    systemd: bool
    """It is a unit of systemd's, which writes what it knows itself again when it is reloaded."""

    def limit(self, memory: int, cpu: float) -> None:
        """``memory`` bytes without swap, ``cpu`` cores. Raises ``OSError``."""
        for path, value in (*_memory(self.memory, memory), *_cpu(self.cpu, cpu)):
            # Not created where it is missing: only the kernel makes files there.
            with path.open("r+b", buffering=0) as file:
                file.write(str(value).encode())


def find(container: str, pid: int, proc: Path = Path("/proc")) -> Group:
    """The group of the container with this id, which process ``pid`` is in. Raises ``Unavailable`` where it cannot be
    seen from here, or is not that container's own."""
    try:
        groups, mounts = (proc / str(pid) / "cgroup").read_text(), (proc / "self" / "mountinfo").read_text()
    except OSError as error:
        raise Unavailable(f"the control group of process {pid} cannot be read: {error}") from error
    return located(container, groups, mounts)


def located(container: str, groups: str, mounts: str) -> Group:
    """The same from what the kernel says: ``/proc/PID/cgroup`` and ``/proc/self/mountinfo``."""
    if not _ID.fullmatch(container):
        raise Unavailable(f"{container!a:.80} is no container's id")
    memory, cpu = (_controller(name, container, groups, mounts) for name in ("memory", "cpu"))
    return Group(memory, cpu, systemd=any(each.directory.name.endswith(_SCOPE) for each in (memory, cpu)))


def _controller(name: str, container: str, groups: str, mounts: str) -> Controller:
    """Of version 1 where the machine has this controller there, else of version 2."""
    paths = dict(_paths(groups))
    key = name if name in paths else ""
    if key not in paths:
        raise Unavailable(f"no control group has the controller {name}")
    own = _own(PurePosixPath(paths[key]), container)
    for root, mount, controllers in _mounts(mounts):
        if key in controllers and own.is_relative_to(root):
            return Controller(mount / own.relative_to(root), unified=not key)
    raise Unavailable(f"the control groups of {name or 'version 2'} are not mounted here")


def _paths(groups: str) -> Iterator[tuple[str, str]]:
    """Controller and path; "" is version 2."""
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _own(path: PurePosixPath, container: str) -> PurePosixPath:
    """The group that the engine made: what lies below it a runtime or the container has made."""
    if ".." not in path.parts:
        for place in (path, *path.parents):
            if re.fullmatch(rf"(?:[a-z]+-)?{container}(?:\.scope)?", place.name):
                return place
    raise Unavailable(f"control group {path} is not container {container[:12]}'s own")


def _mounts(mounts: str) -> Iterator[tuple[PurePosixPath, Path, tuple[str, ...]]]:
    """Of control groups: what is mounted, where, and its controllers (version 2: "")."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), after.split(maxsplit=2)
        if kind in ("cgroup", "cgroup2"):
            controllers = tuple(options.split(",")) if kind == "cgroup" else ("",)
            yield PurePosixPath(fields[3]), Path(fields[4]), controllers


def _memory(controller: Controller, nbytes: int) -> list[tuple[Path, int]]:
    """What is written to which file, in order: of version 1, memory with swap is never less than memory."""
    directory = controller.directory
    if controller.unified:
        return [(directory / "memory.max", nbytes), *_if_there(directory / "memory.swap.max", 0)]
    limit, both = directory / "memory.limit_in_bytes", directory / "memory.memsw.limit_in_bytes"
    files = [(limit, nbytes), *_if_there(both, nbytes)]
    return files[::-1] if int(limit.read_text()) < nbytes else files


def _cpu(controller: Controller, cores: float) -> list[tuple[Path, int | str]]:
    quota = max(1000, int(cores * PERIOD_US))  # the kernel takes no less
    if controller.unified:
        return [(controller.directory / "cpu.max", f"{quota} {PERIOD_US}")]
    return [
        (controller.directory / "cpu.cfs_period_us", PERIOD_US),
        (controller.directory / "cpu.cfs_quota_us", quota),
    ]


def _if_there(path: Path, value: int) -> list[tuple[Path, int]]:
    """A kernel that does not count swap lacks the file."""
    return [(path, value)] if path.exists() else []
