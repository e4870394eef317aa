"""The limits that ``load`` holds itself against: the disk by fio, or by a direct reader of ours where there is none."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import shutil
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks import page_cache
from benchmarks.programs import ProgramFailed

BLOCK: Final = 4 * 2**20
DEPTH: Final = 32
HUGE_THREADS: Final = (1, 4)
_TRIES: Final = 2
_HUGE_PAGE: Final = 2 * 2**20
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


def huge_threads(path: Path) -> int:
    """One thread or four: whichever reads ``path`` faster (``huge_read_s``), tried twice each in turn.

    Chosen once, not at each sample: the better of two reads is a luckier disk than anybody else's one read has.
    """
    tried = [(huge_read_s(path, threads), threads) for _ in range(_TRIES) for threads in HUGE_THREADS]
    return min(tried)[1]


def huge_read_s(path: Path, threads: int) -> float:
    """Seconds of a bare direct read into pages of 2 MiB, 4 MiB at a time, by that many threads.

    fio's buffers have pages of 4 KiB, of which a disk request takes few: on some disks that halves what they give.
    Raises ``OSError`` where the filesystem has no direct I/O.
    """
    buffers = [_huge_buffer() for _ in range(threads)]
    offsets, lock, size = iter(range(0, path.stat().st_size, BLOCK)), threading.Lock(), path.stat().st_size
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def work(buffer: memoryview) -> int:
        got = 0
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return got
            got += os.preadv(fd, [buffer], offset)

    try:
        with ThreadPoolExecutor(threads) as pool:
            began = time.perf_counter()
            got = sum(pool.map(work, buffers))
            took = time.perf_counter() - began
    finally:
        os.close(fd)
    if got != size:
        raise ProgramFailed(f"direct reads of {path} brought {got} of {size} bytes")
    return took


def _huge_buffer() -> memoryview:
    """``BLOCK`` bytes at a border of 2 MiB, in huge pages where the kernel gives them, all in place."""
    memory = mmap.mmap(-1, BLOCK + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory.write(bytes(len(memory)))
    first = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % _HUGE_PAGE
    return memoryview(memory)[first : first + BLOCK]
