"""What a run was made on, read from the machine itself."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import psutil


def describe() -> dict[str, Any]:
    """CPU, cores, memory, kernel, accelerators, Python."""
    return {
        "cpu": _cpu(),
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
    """A directory's name for results of this machine."""
    made = describe()
    parts = [made["cpu"], f"{made['cores']}-cores", *made["accelerators"]]
    return re.sub(r"[^a-z0-9]+", "-", " ".join(parts).lower()).strip("-")


def commit() -> str:
    """The checkout's commit, with ``+`` if something is not committed."""
    root = Path(__file__).resolve().parents[1]
    head = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=False
    )
    state = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=False)
    return (head.stdout.strip() or "unknown") + ("+" if state.stdout.strip() else "")


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


def _accelerators() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=10)
    return [line.strip() for line in found.stdout.splitlines() if line.strip()] if found.returncode == 0 else []
