"""``profiles.toml``, which the platform and the SDK both write, each in its turn."""

from __future__ import annotations

import json
from datetime import date, datetime, time
from typing import Any, Final

PROFILES_FILE: Final = "profiles.toml"
LOCK_FILE: Final = "profiles.lock"
"""Held (flock) by who changes the file beside it."""
PLATFORM_LOCK: Final = "up.lock"
"""In a platform's data directory, held for as long as it runs."""


def profile_name(value: str) -> str:
    """``value``, checked: a line of text. Raises ``ValueError``."""
    if not value.isprintable() or not value.strip():  # bytes of a command line that are no UTF-8 are not printable
        raise ValueError(f"{value!a:.80} is no profile's name: letters, digits and signs that can be printed")
    return value


def toml(document: dict[str, Any]) -> str:
    """``document`` as TOML: all that ``tomllib`` reads, since what else the file holds is its owner's."""
    lines: list[str] = []
    _table(document, (), lines)
    return "\n".join(lines) + "\n"


def _table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    plain = {key: value for key, value in table.items() if not isinstance(value, dict)}
    if path and (plain or not table):
        lines.append(f"[{'.'.join(_text(part) for part in path)}]")
    lines += [f"{_text(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in table.items():
        if isinstance(value, dict):
            _table(value, (*path, key), lines)


def _value(value: Any) -> str:
    match value:
        case str():
            return _text(value)
        case bool():
            return "true" if value else "false"
        case datetime() | date() | time():
            return value.isoformat()
        case list():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            return f"{{{', '.join(f'{_text(key)} = {_value(each)}' for key, each in value.items())}}}"
        case _:
            return repr(value)  # a number, also one that is infinite or none


def _text(value: str) -> str:
    # JSON's texts are TOML's too, but for DEL, and for the pairs of escapes that stand for one letter.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
