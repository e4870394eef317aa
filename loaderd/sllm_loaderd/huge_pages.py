"""Pages of 2 MiB for chunks: whether the kernel gives them to shared memory, and asking it to."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Final

log = logging.getLogger(__name__)

SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_GIVING: Final = frozenset({"advise", "always", "within_size", "force"})


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
