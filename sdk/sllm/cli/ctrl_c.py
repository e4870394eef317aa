"""A Ctrl-C that is not lost, wherever it comes.

Python raises ``KeyboardInterrupt`` between any two instructions, and some of those places cannot raise: what runs
inside an import may be called by compiled code that prints and drops it (pydantic's core while it builds a schema, the
callback of a module's lock), so that the command goes on; and one inside ``__enter__``, between a lock taken and the
``with`` that gives it back, leaves the lock taken for ever. Such a Ctrl-C waits until it can be answered: here, or by
who has taken over meanwhile (an event loop, in which a ``KeyboardInterrupt`` would tear what it starts from its owner).
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Final

AGAIN_S: Final = 0.02
_IMPORT: Final = "<frozen importlib._bootstrap>"


def prepare() -> None:
    """From here on Ctrl-C is answered where it can be, as soon as it can be.

    In a thread, and where Ctrl-C is ignored or somebody else's, nothing is changed.
    """
    ours = threading.current_thread() is threading.main_thread()
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGALRM, _answer)
        signal.signal(signal.SIGINT, _answer)


def _answer(number: int, frame: FrameType | None) -> None:
    if number == signal.SIGALRM and signal.getsignal(signal.SIGINT) is not _answer:
        signal.raise_signal(signal.SIGINT)
        return
    if _can_raise(frame):
        raise KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)


def _can_raise(frame: FrameType | None) -> bool:
    if frame is not None and frame.f_code.co_name.startswith("__"):
        return False
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return False
        frame = frame.f_back
    return True
