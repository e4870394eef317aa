"""Where a checkpoint is written until it is whole: beside its target, under a name that a later conversion can clear.

The writer holds a lock on its directory. A lock dies with its process, so what can be locked is left over from one
that was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from sllm_loaderd.files import sync_directory
from sllm_runtime.protocol.errors import Conflict


@contextlib.contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A new directory that becomes ``target`` when the block ends well, and is gone otherwise.

    Raises ``Conflict`` if ``target`` is there, before or after.
    """
    _refuse(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    _clear(target)
    staging, lock = _locked(target)
    try:
        yield staging
        _refuse(target)
        os.rename(staging, target)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    finally:
        os.close(lock)
    sync_directory(target.parent)


def _refuse(target: Path) -> None:
    if target.exists():
        raise Conflict(f"{target} is there already; remove it or give another name", field="target")


def _locked(target: Path) -> tuple[Path, int]:
    while True:
        staging = target.parent / f".{target.name}.{secrets.token_hex(4)}.tmp"
        staging.mkdir()
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # another conversion took it for a left-over in this very moment, and removes it
            os.close(lock)
            continue
        return staging, lock


def _clear(target: Path) -> None:
    """Remove what killed conversions to ``target`` have left."""
    for left in target.parent.glob(f".{_literal(target.name)}.????????.tmp"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # somebody is writing it
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
