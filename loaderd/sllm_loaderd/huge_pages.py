"""Pages of 2 MiB for chunks: whether the kernel gives them to shared memory, and asking it to."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
MEMINFO: Final = Path("/proc/meminfo")
_TAKEN: Final = re.compile(r"^ShmemHugePages: +(\d+) kB$", re.MULTILINE)
_GIVING: Final = frozenset({"advise", "always", "within_size", "force"})


def taken(meminfo: Path = MEMINFO) -> int:
    """Bytes of this machine's shared memory that are in pages of 2 MiB; 0: it does not say."""
    try:
        found = _TAKEN.search(meminfo.read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found is not None else 0


def have_huge_pages(setting: Path = SHMEM_ENABLED) -> bool:
    """Whether shared memory that asks for huge pages gets them. Turned on for those who ask (``advise``) where allowed.

    Only who asks is affected by that; without the right to change it, small pages serve as well, and cost more.
    """
    try:
        chosen = re.search(r"\[(\w+)\]", setting.read_text())
        if chosen is None or chosen[1] in _GIVING:
            return chosen is not None
        setting.write_text("advise")
    except OSError as error:
        log.info("chunks have pages of 4 KiB: %s: %s", setting, error.strerror)
        return False
    log.info("%s was %s and is advise now", setting, chosen[1])
    return True
