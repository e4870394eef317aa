"""Accelerators."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from sllm.doctor.finding import Finding, failure, ok

ANSWERS_S: Final = 15.0


def has_gpu() -> bool:
    """Whether the kernel shows an NVIDIA device."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu() -> Finding:
    """GPU and driver."""
    smi = shutil.which("nvidia-smi")
    if not has_gpu():
        if smi is None or said([smi, "-L"])[0]:
            return ok("gpu", "none; functions run on the CPU")
        return failure("gpu", "nvidia-smi sees one, /dev/nvidia* is not there", "pass the devices into this container")
    if smi is None:
        return failure("gpu", "/dev/nvidia* without nvidia-smi", "install the NVIDIA driver's utilities")
    query = "--query-gpu=name,memory.total,driver_version"
    failed, text = said([smi, query, "--format=csv,noheader"])
    if failed:
        return failure("gpu", text, "load or update the NVIDIA driver; `nvidia-smi` has to work")
    return ok("gpu", "; ".join(text.splitlines()))


def said(argv: list[str], within_s: float = ANSWERS_S) -> tuple[bool, str]:
    """Whether a command failed, and what it said."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=within_s, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return True, str(error)
    return done.returncode != 0, (done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-300:])
