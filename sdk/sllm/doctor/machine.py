"""Accelerators and container engines."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Final

from sllm.doctor.finding import Finding, failure, ok, warning

ANSWERS_S: Final = 15.0
ENGINES: Final = ("docker", "podman")


def has_gpu() -> bool:
    """Whether the kernel shows an NVIDIA device."""
    return any(Path("/dev").glob("nvidia[0-9]*"))


def gpu() -> Finding:
    """GPU and driver."""
    smi = shutil.which("nvidia-smi")
    if not has_gpu():
        if smi is None or _said([smi, "-L"])[0]:
            return ok("gpu", "none; functions run on the CPU")
        return failure("gpu", "nvidia-smi sees one, /dev/nvidia* is not there", "pass the devices into this container")
    if smi is None:
        return failure("gpu", "/dev/nvidia* without nvidia-smi", "install the NVIDIA driver's utilities")
    query = "--query-gpu=name,memory.total,driver_version"
    failed, text = _said([smi, query, "--format=csv,noheader"])
    if failed:
        return failure("gpu", text, "load or update the NVIDIA driver; `nvidia-smi` has to work")
    return ok("gpu", "; ".join(text.splitlines()))


def containers() -> Finding:
    """A container engine that this user may drive: for functions with `image` or `requirements`."""
    reasons = []
    for engine in ENGINES:
        if shutil.which(engine) is None:
            reasons.append(f"{engine} is not installed")
            continue
        failed, text = _said([engine, "version", "--format", "{{.Server.Version}}"])
        if not failed:
            return ok("containers", f"{engine} {text}")
        reasons.append(f"{engine}: {text.splitlines()[-1] if text else 'no answer'}")
    remedy = (
        "nothing needs one yet: functions run as processes, and `image` and `requirements` are refused at deploy; "
        "for later, install docker or podman, start its daemon and join its group"
    )
    return warning("containers", "; ".join(reasons), remedy)


def _said(argv: list[str]) -> tuple[bool, str]:
    """Whether a command failed, and what it said."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=ANSWERS_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return True, str(error)
    return done.returncode != 0, (done.stdout.strip() if done.returncode == 0 else done.stderr.strip()[-300:])
