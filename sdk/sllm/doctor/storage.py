"""Disk: space, and reads that pass the page cache by."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Final

from sllm import profiles
from sllm.doctor.finding import Finding, failure, ok, warning
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.limits import LEAST_FILES, LEAST_FREE
from sllm_runtime.protocol.quantities import show_bytes

MIN_FREE: Final = 2 * 2**30
_BYTES: Final = 8 * 2**20
_OWN: Final = "set SLLM_HOME to a directory of your own"
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT})
_ROOM: Final = "make room on its disk"


def _existing(path: Path) -> Path:
    """The nearest above that is there, as far as this user may look."""
    while not _is_there(path):
        path = path.parent
    return path


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except PermissionError:
        return False


def _place() -> Path:
    """Raises ``InvalidRequest`` where there is none."""
    return _existing(profiles.home().absolute())


def space() -> Finding:
    """Free bytes where models and bundles are kept."""
    try:
        place = _place()
    except InvalidRequest as error:
        return failure("disk space", error.message, _OWN)
    if not os.access(place, os.W_OK):
        return failure("disk space", f"{place} cannot be written", _OWN)
    free, found = shutil.disk_usage(place).free, os.statvfs(place)
    what, remedy = f"{show_bytes(free)} free at {place}", "make room, or set SLLM_HOME"
    if free < LEAST_FREE:
        return failure("disk space", f"{what}, the state needs {show_bytes(LEAST_FREE)}", remedy)
    if found.f_files and found.f_favail < LEAST_FILES:
        return failure("disk space", f"room for {found.f_favail} more files (inodes) at {place}", "remove some files")
    return ok("disk space", what) if free >= MIN_FREE else warning("disk space", what, remedy)


def direct_io() -> Finding:
    """Writes a file where models are kept and reads it with O_DIRECT."""
    try:
        place = _place()
    except InvalidRequest as error:
        return failure("direct I/O", error.message, _OWN)
    remedy = "set SLLM_HOME to a file system with direct I/O (ext4, xfs); reads go through the page cache meanwhile"
    try:
        with tempfile.NamedTemporaryFile(dir=place, prefix=".sllm-doctor-") as file, mmap.mmap(-1, _BYTES) as buffer:
            file.write(os.urandom(_BYTES))
            file.flush()
            os.fsync(file.fileno())
            fd = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
            try:
                began = time.perf_counter()
                read = os.preadv(fd, [buffer], 0)
                seconds = time.perf_counter() - began
            finally:
                os.close(fd)
    except OSError as error:
        return warning("direct I/O", f"{place}: {error.strerror}", _ROOM if error.errno in _FULL else remedy)
    if read != _BYTES:
        return warning("direct I/O", f"{place}: read {read} of {_BYTES} bytes", remedy)
    return ok("direct I/O", f"{place}: one read of 8 MiB at {show_bytes(_BYTES / seconds)}/s")


def temporary() -> Finding:
    """Where temporary files of the platform and of functions' starts are made."""
    try:
        return ok("temporary files", tempfile.gettempdir())
    except OSError as error:
        return failure("temporary files", error.strerror or str(error), "name one by TMPDIR, or mount one at /tmp")


def locks() -> Finding:
    """Whether files can be locked where the platform keeps its own: not on every network file system."""
    import fcntl

    try:
        place = _place()
        with tempfile.TemporaryFile(dir=place) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                what = f"files in {place} cannot be locked: {error.strerror}"
                return failure("file locks", what, "set SLLM_HOME to a directory on a disk of this machine")
    except InvalidRequest as error:
        return failure("file locks", error.message, _OWN)
    except OSError as error:
        if error.errno in _FULL:
            return warning("file locks", f"could not be tried: {place}: {error.strerror}", _ROOM)
        return failure("file locks", f"{place}: {error.strerror}", _OWN)
    return ok("file locks", f"files in {place} can be locked")
