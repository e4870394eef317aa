"""Which of the platform's errors are this instance's word on a call. User code that calls other functions raises the
same classes, and those say nothing of the instance that it runs in."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, TypeVar

from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.worker.words import words_of

_MARK: Final = "_sllm_own"
E = TypeVar("E", bound=SllmError)


def marked(error: E) -> E:
    """``error``, which is the platform's own: a call that ends by it ends with just that error."""
    setattr(error, _MARK, True)
    return error


@contextlib.contextmanager
def own(kind: type[SllmError] = SllmError) -> Iterator[None]:
    """Errors of ``kind`` that are raised inside are the platform's own."""
    try:
        yield
    except kind as error:
        marked(error)
        raise


class Foreign(Exception):
    """What user code let through of another call's end, by its type and text."""


@contextlib.contextmanager
def users() -> Iterator[None]:
    """User code runs inside, as an instance starts: what it raises of the platform's classes and is not ``own`` is but
    an exception of its. Raises ``Foreign`` for that."""
    try:
        yield
    except SllmError as error:
        if is_own(error):
            raise
        raise Foreign(words_of(error)) from error


def is_own(error: SllmError) -> bool:
    """Whether it is ``marked``."""
    return hasattr(error, _MARK)
