"""What this machine offers a node, read once at start. Overrides are for tests and for sharing one machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sllm_runtime.platform.control_groups import LIMITS
from sllm_runtime.platform.control_groups import groups as groups
from sllm_runtime.platform.control_groups import memory as memory
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.node import Gpu
from sllm_runtime.protocol.quantities import gpu_kind, is_gpu_kind, parse_bytes

_MEMINFO: Final = Path("/proc/meminfo")
_NVIDIA: Final = Path("/proc/driver/nvidia/gpus")
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_CACHED = re.compile(r"^(?:active|inactive)_file (\d+)$", re.MULTILINE)
_TOTAL = re.compile(r"^total_(?:active|inactive)_file (\d+)$", re.MULTILINE)
"""With the groups below it, as version 1 says it."""
_USED: Final = ("memory.current", "memory.usage_in_bytes")
_QUOTA: Final = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_MODEL = re.compile(r"^Model:\s*(?:NVIDIA\s+)?(.+)$", re.MULTILINE)


def cores(within: Sequence[Path] = ()) -> float:
    """CPUs this process may use: the affinity mask, cut by its control groups' quotas."""
    count = float(len(os.sched_getaffinity(0)))
    for group in within or groups():
        with contextlib.suppress(OSError, ValueError):  # the other version, or no quota ("max")
            quota, period = map(int, (group / "cpu.max").read_text().split())
            count = min(count, quota / period)
        with contextlib.suppress(OSError, ValueError):
            quota, period = (int((group / name).read_text()) for name in _QUOTA)
            count = min(count, quota / period) if quota > 0 else count
    return count


def available(within: Sequence[Path] = (), machine: Path = _MEMINFO) -> int:
    """Bytes that can be had without anybody being killed: the machine's, cut by what its control groups' limits leave.
    What the page cache holds counts, since the kernel gives it up."""
    try:
        found = _AVAILABLE.search(machine.read_text())
    except OSError:
        found = None
    free = int(found[1]) * 1024 if found else memory(within)
    for group, names in itertools.product(within or groups(), zip(LIMITS, _USED, strict=True)):
        with contextlib.suppress(OSError, ValueError):
            limit, used = (int((group / name).read_text()) for name in names)
            stat = (group / "memory.stat").read_text()
            cached = sum(map(int, _TOTAL.findall(stat) or _CACHED.findall(stat)))
            free = min(free, max(0, limit - used + cached))
    return free


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """GPUs from ``"L4:24GiB,L4:24GiB"``. Raises ``InvalidRequest``."""
    gpus = []
    for index, item in enumerate(filter(None, (part.strip() for part in text.split(",")))):
        kind, _, size = item.partition(":")
        try:
            if not is_gpu_kind(kind):
                raise ValueError(kind)
            gpus.append(Gpu(index=index, kind=kind, memory=parse_bytes(size)))
        except ValueError as error:
            raise InvalidRequest(f"SLLM_GPUS: {item!r} is no GPU; write for example 'L4:24GiB'") from error
    return tuple(gpus)


def parse_labels(text: str) -> dict[str, str]:
    """Labels from ``"zone=a,disk=nvme"``. Raises ``InvalidRequest``."""
    pairs = [[word.strip() for word in part.partition("=")] for part in text.split(",") if part.strip()]
    bad = [key for key, equals, _value in pairs if not key or not equals]
    if bad:
        raise InvalidRequest(f"SLLM_LABELS: {bad[0]!r} is no label; write for example 'zone=a,disk=nvme'")
    return {key: value for key, _equals, value in pairs}


def nvidia_gpus() -> tuple[Gpu, ...]:
    """The GPUs the NVIDIA driver lists. Their memory is 0 here: reading it needs a library this daemon has no use for
    until the GPU driver of sandboxes is there; an operator may state it in SLLM_GPUS."""
    gpus = []
    for index, folder in enumerate(sorted(_NVIDIA.iterdir()) if _NVIDIA.is_dir() else []):
        found = _MODEL.search((folder / "information").read_text())
        kind = gpu_kind(found[1]) if found else "unknown"
        gpus.append(Gpu(index=index, kind=kind, memory=0))
    return tuple(gpus)
