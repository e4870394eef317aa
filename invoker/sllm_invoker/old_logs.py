"""What all functions' log files take together: the lines of those that wrote least recently go first. Nobody tells a
node that a function is deleted, and its files would stay for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from sllm_runtime.protocol import limits

log = logging.getLogger(__name__)

LOGS_BYTES: Final = 1024 * limits.MIB
EVERY_S: Final = 600.0


@dataclass(frozen=True)
class Lines:
    """The files of one function. ``written``: when it last wrote, seconds since 1970."""

    function: str
    written: float
    nbytes: int
    paths: tuple[Path, ...] = ()


def surplus(found: Iterable[Lines], busy: Set[str], limit: int) -> list[Lines]:
    """Whose files go, so that what stays has ``limit`` bytes at most. Those of no function that is ``busy``."""
    dropped = []
    known = sorted(found, key=lambda lines: lines.written)
    used = sum(lines.nbytes for lines in known)
    for lines in known:
        if used <= limit:
            break
        if lines.function not in busy:
            dropped.append(lines)
            used -= lines.nbytes
    return dropped


def found(folder: Path) -> list[Lines]:
    """What lies in ``folder``, which need not be there."""
    known: dict[str, Lines] = {}
    for path in folder.glob("*.jsonl*"):
        try:
            stat = path.stat()
        except OSError:  # rotated meanwhile
            continue
        function = path.name.partition(".")[0]
        one = known.get(function, Lines(function, 0.0, 0))
        written, nbytes = max(one.written, stat.st_mtime), one.nbytes + stat.st_size
        known[function] = Lines(function, written, nbytes, (*one.paths, path))
    return list(known.values())


async def keep_within(folder: Path, busy: Callable[[], Set[str]], limit: int = LOGS_BYTES) -> None:
    """Drop what is too much, now and then, until cancelled. ``busy``: functions that have instances, or files open."""
    while True:
        try:
            known = await asyncio.to_thread(found, folder)
        except OSError as error:
            log.warning("the logs in %s cannot be looked at: %s", folder, error)
            known = []
        for lines in surplus(known, busy(), limit):
            if lines.function not in busy():  # it may have begun meanwhile
                _drop(lines)
            await asyncio.sleep(0)  # each takes the disk's time
        await asyncio.sleep(EVERY_S)


def _drop(lines: Lines) -> None:
    log.info("the log of function %s is dropped: the logs of this node are too large", lines.function)
    for path in lines.paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s cannot be removed: %s", path, error)
