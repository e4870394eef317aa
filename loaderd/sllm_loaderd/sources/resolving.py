"""What a library finds out in its own time, and for which nobody waits longer than is sensible."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

from sllm_loaderd.reader import SourceClosed
from sllm_runtime.protocol.errors import Unavailable

T = TypeVar("T")


class Resolving(Generic[T]):
    """One question, which ``find`` answers in a thread of its own: who asks while it is under way has its answer, too.

    Nobody can end what a library waits for (a program that is to print credentials, a socket): what is late goes on by
    itself, beside it no other one is begun, and all who ask meanwhile are refused at once. Thread-safe.
    """

    def __init__(self, find: Callable[[], T], what: str, within_s: float) -> None:
        self._find, self._what, self._within_s = find, what, within_s
        self._changed = threading.Condition()
        self._asked: Future[T] | None = None
        self._until = 0.0
        self._closed = False

    def get(self) -> T:
        """What ``find`` returns or raises. Raises ``Unavailable`` where that takes more than ``within_s``, and after
        ``close``."""
        with self._changed:
            if not self._closed:
                asked = self._asked
                if asked is None or asked.done():
                    asked = self._begun()
                self._changed.wait_for(lambda: asked.done() or self._closed, self._until - time.monotonic())
                if asked.done():
                    return asked.result()
            if self._closed:
                raise SourceClosed(f"{self._what} are not waited for any more: the source was closed")
        raise Unavailable(
            f"{self._what} did not come within {self._within_s:g} s; look at what gives them, which goes on, and which"
            " nobody here can end: with what it gives in the end all goes on by itself"
        )

    def close(self) -> None:
        """Who waits is told at once; repeatable."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _begun(self) -> Future[T]:
        asked: Future[T] = Future()
        try:
            threading.Thread(target=self._run, args=(asked,), name="sllm-resolving", daemon=True).start()
        except RuntimeError as error:
            raise Unavailable(f"{self._what}: {error}; ask again") from error
        self._asked, self._until = asked, time.monotonic() + self._within_s
        return asked

    def _run(self, asked: Future[T]) -> None:
        try:
            asked.set_result(self._find())
        except Exception as error:
            asked.set_exception(error)
        with self._changed:
            self._changed.notify_all()
