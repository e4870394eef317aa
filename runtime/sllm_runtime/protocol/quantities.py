"""Quantities as people write them: ``"2GiB"``, ``"90s"``, ``"H100:2"``."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo

LOAD_TIME: Final = "load-time"
"""A keep-alive as long as the instance's start was expected to take."""
LONGEST_S: Final = 100 * 365 * 86400
"""A hundred years of seconds, which means for ever: beside today's date they fit 64 bits also as nanoseconds."""
MOST_BYTES: Final = 2**50
"""What so many processes as an instance can have take together still fits 64 bits."""
KEPT: Final = "kept"
"""Context of a validation: what is read was taken before, perhaps when there was no limit. It is cut, not refused."""
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)[bB]?\s*$")
_TIME = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h)?\s*$")
_KIND = r"[A-Za-z][A-Za-z0-9._-]{0,63}"
_GPU = re.compile(rf"^({_KIND})(?::([1-9]\d?))?\Z")
_KINDS = re.compile(rf"{_KIND}\Z")
_NO_KIND = re.compile(r"[^A-Za-z0-9._-]+")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


def parse_bytes(value: Any) -> Any:
    """Bytes from ``"1.5GiB"`` (binary) or ``"2GB"`` (decimal). Anything but text is passed through."""
    if not isinstance(value, str):
        return value
    match = _BYTES.match(value)
    if not match:
        raise ValueError(f"{value!r} is no size; write for example '512MiB' or '2GB'")
    number, unit, binary = match.groups()
    count = float(number) * (1024 if binary else 1000) ** _POWER[unit.upper()]
    if count > MOST_BYTES:
        raise ValueError(f"{value!r:.80} is too large a size; 1024TiB is the most")
    return int(count)


def parse_seconds(value: Any) -> Any:
    """Seconds from ``"90s"``, ``"5m"``, ``"250ms"``, ``"1h"``. Anything but text is passed through."""
    if not isinstance(value, str):
        return value
    match = _TIME.match(value)
    if not match:
        raise ValueError(f"{value!r} is no duration; write for example '90s', '5m' or '250ms'")
    return float(match[1]) * _SECONDS[match[2]]


def parse_keep_alive(value: Any, info: ValidationInfo) -> Any:
    """Seconds as ``parse_seconds`` gives them, from 0 to ``LONGEST_S``; ``LOAD_TIME`` is passed through."""
    if value == LOAD_TIME:
        return value
    seconds = _cut(parse_seconds(value), LONGEST_S, info)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= LONGEST_S:
        raise ValueError(f"{value!r:.80} is no keep-alive; write seconds, 0 to {LONGEST_S}, or '5m', or {LOAD_TIME!r}")
    return float(seconds)


def _cut(value: Any, most: int, info: ValidationInfo) -> Any:
    """At most ``most`` of what is ``KEPT``; what people hand in stays as it is, and is refused where it is more."""
    kept = info.context == KEPT and isinstance(value, int | float)
    return min(value, most) if kept else value


def _cut_seconds(value: Any, info: ValidationInfo) -> Any:
    return _cut(value, LONGEST_S, info)


def _cut_bytes(value: Any, info: ValidationInfo) -> Any:
    return _cut(value, MOST_BYTES, info)


@lru_cache(maxsize=1024)
def parse_gpu(value: str) -> tuple[str, int]:
    """Kind and count of ``"H100:2"``; ``"any"`` is any kind."""
    match = _GPU.match(value)
    if not match:
        raise ValueError(f"{value!r} is no GPU; write a kind and, if more than one, a count: 'L4', 'H100:2', 'any:1'")
    return match[1], int(match[2] or 1)


def is_gpu_kind(text: str) -> bool:
    """Whether a function can ask for accelerators of that kind by ``text``."""
    return _KINDS.match(text) is not None


def gpu_kind(name: str) -> str:
    """The kind by which accelerators with such a ``name`` of their driver are asked for: ``H100-80GB-HBM3``."""
    kind = _NO_KIND.sub("-", name).strip("-")[:64]
    return kind if is_gpu_kind(kind) else "unknown"


def show_bytes(count: float) -> str:
    """``count`` bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


Bytes = Annotated[int, BeforeValidator(_cut_bytes), BeforeValidator(parse_bytes), Field(le=MOST_BYTES)]
Seconds = Annotated[float, BeforeValidator(_cut_seconds), BeforeValidator(parse_seconds), Field(le=LONGEST_S)]
KeepAlive = Annotated[float | Literal["load-time"], BeforeValidator(parse_keep_alive)]
