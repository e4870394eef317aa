"""Ctrl-C: what was begun is undone or named, and the exit status is 130."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

from sllm_runtime.protocol.errors import SllmError


class Interrupted(SllmError):
    """The user ended a command. The message says what became of what it had begun."""

    code = "interrupted"
    exit_code: ClassVar[int] = 130


@contextmanager
def naming(what: str | Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C inside, ``what`` is said: what is undone, or goes on, and where to look."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise Interrupted(what if isinstance(what, str) else what()) from error
