"""What a run was made on, read from the machine itself."""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks import page_cache

_BLOCK: Final = 4 * 2**20
DISK_BYTES: Final = 32 * _BLOCK


def describe() -> dict[str, Any]:
    """CPU, cores, memory, kernel, accelerators, Python."""
    return {
        "cpu": _cpu(),
        "vectors": vectors(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "accelerators": _accelerators(),
    }


def yardstick() -> float:
    """Milliseconds that a fixed piece of the interpreter's work takes now, the median of seven: the same machine is
    half as fast again in some hours as in others, and this tells such an hour from slower code."""
    took = []
    for _ in range(7):
        began = time.perf_counter()
        sum(number * number for number in range(500_000))
        took.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(took), 2)


def name() -> str:
    """A directory's name for results of this machine. A hypervisor tells processors of several generations by one name:
    one that lacks vectors of 512 bits has what it has in its own, since the engine's kernels differ by that."""
    made = describe()
    lacks = [] if made["vectors"].startswith("avx512") else [made["vectors"]]
    parts = [made["cpu"], *lacks, f"{made['cores']}-cores", *made["accelerators"]]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def commit() -> str:
    """The checkout's commit, with ``+`` if something is not committed."""
    root = Path(__file__).resolve().parents[1]
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    state = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "unknown") + ("+" if state.stdout.strip() else "")


def disk(directory: Path) -> dict[str, Any]:
    """What ``directory`` lies on, and how fast that reads past the page cache: a fresh file, once, two requests at a
    time; None where it does not do that (memory)."""
    found: dict[str, Any] = {"device": disk_of(directory), "direct_read_gb_s": None}
    with tempfile.NamedTemporaryFile(dir=directory, prefix="sllm-disk-") as file:
        block = os.urandom(_BLOCK)
        for _ in range(DISK_BYTES // _BLOCK):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        with contextlib.suppress(OSError):
            made = page_cache.direct_read(Path(file.name), 2, _BLOCK)
            found["direct_read_gb_s"] = round(DISK_BYTES / made.seconds / 1e9, 2)
    return found


def disk_of(directory: Path) -> str:
    """The block device (or what stands for one) and the file system that a directory is on."""
    best = max(
        (each for each in psutil.disk_partitions(all=True) if directory.resolve().is_relative_to(each.mountpoint)),
        key=lambda each: len(each.mountpoint),
        default=None,
    )
    return f"{best.device}, {best.fstype}" if best else "unknown"


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def vectors() -> str:
    """The widest vector instructions that the processor has, of those that kernels are chosen by."""
    flags = next(
        (line.split() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), []
    )
    return next((each for each in ("avx512_bf16", "avx512f", "avx2") if each in flags), "none")


def _accelerators() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []
