"""The limits that ``load`` holds itself against: the disk by fio, or by a direct reader of ours where there is none."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import page_cache
from benchmarks.programs import ProgramFailed

BLOCK: Final = 4 * 2**20
DEPTH: Final = 32
_LIMIT_S: Final = 300.0


@dataclass(frozen=True)
class DiskRead:
    """One sequential direct read of a whole file. ``cpu_s``: -1 where it is not known."""

    seconds: float
    cpu_s: float


def disk_system() -> str:
    """What the reference is called here."""
    return "fio" if shutil.which("fio") else "direct read"


def disk_read(path: Path) -> DiskRead:
    """Read ``path`` once, 4 MiB at a time, 32 in flight, past the page cache. Raises ``ProgramFailed``, ``OSError``."""
    if shutil.which("fio") is None:
        return DiskRead(page_cache.direct_read_s(path, DEPTH, BLOCK), -1.0)
    words = [
        "fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", f"--bs={BLOCK}", f"--iodepth={DEPTH}",
        "--direct=1", "--ioengine=libaio", "--invalidate=0", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_LIMIT_S, cwd=path.parent)
    if done.returncode:
        raise ProgramFailed(f"fio ended with {done.returncode}: {done.stderr[-500:]}")
    return read_report(done.stdout, path.stat().st_size)


def read_report(text: str, nbytes: int) -> DiskRead:
    """Seconds from fio's JSON, the time in which it really read. Raises ``ProgramFailed`` if it read another amount."""
    job = json.loads(text[text.index("{") :])["jobs"][0]
    read, error = job["read"], job["error"]
    if error or read["io_bytes"] // BLOCK != nbytes // BLOCK:
        raise ProgramFailed(f"fio read {read['io_bytes']} of {nbytes} bytes, error {error}")
    seconds = nbytes / (read["bw_bytes"] or 1)
    return DiskRead(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)
