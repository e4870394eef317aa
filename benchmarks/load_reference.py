"""The limits that ``load`` holds itself against: the disk by fio and by bare direct reads, each in several settings.

All of them are measured, and the one with the best median is the limit: which that is differs from disk to disk.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from benchmarks import page_cache
from benchmarks.page_cache import DiskRead
from benchmarks.programs import ProgramFailed, run_to_end
from benchmarks.record import Case

BLOCK: Final = 4 * 2**20
DEPTH: Final = 32
READS: Final = ((1, BLOCK), (4, BLOCK), (4, 16 * 2**20))
"""Threads and bytes of the bare reads; the last is as loaderd reads."""
FIO: Final = {"fio": {}, "fio, 2 MiB pages": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}}
"""Systems, and what they have in their environment: fio itself asks for huge pages only of those that are reserved."""
_A_SECOND: Final = {"s": 1.0, "ms": 1e3}
_TRIES: Final = 2
_LIMIT_S: Final = 300.0

Read = Callable[[Path], DiskRead]
"""One sequential read of a whole file past the page cache. Raises ``ProgramFailed``, ``OSError``."""


def limits() -> dict[str, Read]:
    """By system."""
    found: dict[str, Read] = {name: functools.partial(_fio, env=env) for name, env in FIO.items()}
    for threads, block in READS:
        name = f"direct read, {threads} of {block // 2**20} MiB"
        found[name] = functools.partial(page_cache.direct_read, threads=threads, block=block)
    return found


def reference(case: Case, read: Read, file: Path, *, primed: bool = True) -> None:
    """One read of a cold file, into its case; what cannot run here is listed with the reason and not tried again."""
    if case.not_run:
        return
    page_cache.empty(file, primed=primed)
    try:
        made = read(file)
    except ProgramFailed as error:
        case.not_run = " ".join(str(error).split())[-300:]
        return
    case.take(round(made.seconds * _A_SECOND[case.unit], 4), made.cpu_s, made.mib)


def _fio(path: Path, env: Mapping[str, str]) -> DiskRead:
    """4 MiB at a time, 32 in flight."""
    if shutil.which("fio") is None:
        raise ProgramFailed("fio is not installed")
    words = [
        "fio", "--name=read", f"--filename={path}", "--readonly", "--rw=read", f"--bs={BLOCK}", f"--iodepth={DEPTH}",
        "--direct=1", "--ioengine=libaio", "--invalidate=0", "--output-format=json",
    ]  # fmt: skip
    done, _ = run_to_end(words, _LIMIT_S, env=env, cwd=path.parent)
    if done.returncode:
        raise ProgramFailed(f"fio ended with {done.returncode}: {done.stderr[-500:]}")
    return read_report(done.stdout, path.stat().st_size)


def read_report(text: str, nbytes: int) -> DiskRead:
    """Seconds from fio's JSON, the time in which it really read. Raises ``ProgramFailed`` if it read another amount, or
    if that is no report."""
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        read, error = job["read"], job["error"]
        if error or read["io_bytes"] // BLOCK != nbytes // BLOCK:
            raise ProgramFailed(f"fio read {read['io_bytes']} of {nbytes} bytes, error {error}")
        seconds = nbytes / (read["bw_bytes"] or 1)
        return DiskRead(seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)
    except (ValueError, KeyError, IndexError) as error:
        raise ProgramFailed(f"fio wrote no report: {text[-300:]!r}") from error


def fastest(path: Path) -> tuple[int, int]:
    """The bare read that reads ``path`` fastest, tried twice each in turn, for cases that have but one beside them.

    Chosen once, not at each sample: the better of two reads is a luckier disk than anybody else's one read has.
    """
    tried = [(page_cache.direct_read(path, *each).seconds, each) for _ in range(_TRIES) for each in READS]
    return min(tried)[1]
