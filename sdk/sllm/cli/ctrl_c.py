"""A Ctrl-C that is not lost, wherever it comes.

Python raises ``KeyboardInterrupt`` between any two instructions, and some of those places cannot raise: what runs
inside an import may be called by compiled code that prints and drops it (pydantic's core while it builds a schema, the
callback of a module's lock), so that the command goes on; and one inside ``__enter__``, between a lock taken and the
``with`` that gives it back, leaves the lock taken for ever. Such a Ctrl-C waits until it can be answered: here, or by
who has taken over meanwhile (an event loop, in which a ``KeyboardInterrupt`` would tear what it starts from its owner).

What of ours cannot be interrupted is over soon. A user's code may never be: it is imported, it is a ``__call__``, and
it may wait there for whatever it likes. There a Ctrl-C waits for PATIENCE_S, or until the next one.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

AGAIN_S: Final = 0.02
PATIENCE_S: Final = 1.0
_IMPORT: Final = "<frozen importlib._bootstrap>"


class Answer:
    """The handler of SIGINT, and of the SIGALRM by which it looks again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._users = False
        self._since: float | None = None
        """When the Ctrl-C came that waits."""

    @contextmanager
    def in_users_code(self) -> Iterator[None]:
        """What runs meanwhile is a user's, and need not come to an end."""
        before, self._users = self._users, True
        try:
            yield
        finally:
            self._users = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT and signal.getsignal(signal.SIGINT) is not self:
            signal.raise_signal(signal.SIGINT)
            return
        if _can_raise(frame) or (self._users and self._has_waited(number)):
            self._since = None
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            raise KeyboardInterrupt
        if self._since is None:
            self._since = self._clock()
        signal.setitimer(signal.ITIMER_REAL, AGAIN_S)

    def _has_waited(self, number: int) -> bool:
        """Whether it has long enough, or is the second."""
        return self._since is not None and (number == signal.SIGINT or self._clock() - self._since >= PATIENCE_S)


answer: Final = Answer()


def prepare() -> None:
    """From here on Ctrl-C is answered where it can be, as soon as it can be.

    In a thread, where Ctrl-C is ignored or somebody else's, and where there is no alarm (Windows), nothing is changed.
    """
    ours = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGALRM, answer)
        signal.signal(signal.SIGINT, answer)


def leave() -> None:
    """The program ends. An alarm that is still to come would kill it, once the interpreter takes its handlers away."""
    if hasattr(signal, "SIGALRM") and signal.getsignal(signal.SIGALRM) is answer:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)


def _can_raise(frame: FrameType | None) -> bool:
    if frame is not None and frame.f_code.co_name.startswith("__"):
        return False
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return False
        frame = frame.f_back
    return True
