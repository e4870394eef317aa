"""Which nats-servers keep the rights of ``subjects``."""

from __future__ import annotations

import re
from typing import Final

_NUMBERS: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)")
_HOLES: Final = (((2, 11, 0), (2, 11, 15)), ((2, 12, 0), (2, 12, 6)))
"""From the first version that has it to the first one that does not: CVE-2026-33249."""


def problem(version: object) -> str:
    """What is wrong with a server of this ``version``, as its greeting or a client shows it; empty: nothing known."""
    found = _NUMBERS.search(str(version))
    numbers = tuple(map(int, found.groups())) if found else ()
    if not any(first <= numbers < fixed for first, fixed in _HOLES):
        return ""
    return "it sends traces to whatever subject a message names, beside all rights of nodes (CVE-2026-33249)"


REMEDY: Final = "take nats-server 2.11.15, 2.12.6 or a later one"
