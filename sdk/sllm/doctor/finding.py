"""What a check found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum


class Level(StrEnum):
    """``failure``: the platform (or what is installed of it) cannot work; ``warning``: it works less well."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


@dataclass(frozen=True)
class Finding:
    """``what`` was found, and the ``remedy`` where it is not as it should be."""

    check: str
    level: Level
    what: str
    remedy: str = ""

    def document(self) -> dict[str, str]:
        """As JSON has it."""
        return {key: str(value) for key, value in asdict(self).items()}


Check = Callable[[], Finding]


def ok(check: str, what: str) -> Finding:
    return Finding(check, Level.OK, what)


def warning(check: str, what: str, remedy: str) -> Finding:
    return Finding(check, Level.WARNING, what, remedy)


def failure(check: str, what: str, remedy: str) -> Finding:
    return Finding(check, Level.FAILURE, what, remedy)
