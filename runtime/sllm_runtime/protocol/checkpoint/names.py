"""Texts of an index that become paths or are compared: file names, digests."""

from __future__ import annotations

import re
from typing import Final

from sllm_runtime.protocol.errors import InvalidCheckpoint

_SHOWN: Final = 300
"""Characters of a hostile name that an error repeats."""
_HEX: Final = re.compile("[0-9a-f]*")


def is_plain_name(name: str) -> bool:
    """Whether ``name`` is one path component of printable characters, and no hidden one."""
    return 0 < len(name) <= 255 and name[0] != "." and "/" not in name and "\\" not in name and name.isprintable()


def is_hex(text: str, digits: int) -> bool:
    """Whether ``text`` is just ``digits`` lower-case hex digits."""
    return len(text) == digits and _HEX.fullmatch(text) is not None


def bad(field: str, message: str) -> InvalidCheckpoint:
    """The error for an index whose ``field`` is wrong."""
    return InvalidCheckpoint(f"{message[:_SHOWN]}; convert the model again", field=field[:_SHOWN])
