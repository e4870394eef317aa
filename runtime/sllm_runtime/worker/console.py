"""stdout and stderr of user code: whole lines, each attributed to the call whose code wrote it."""

from __future__ import annotations

import contextvars
import io
import logging
import sys
import threading
from collections.abc import Callable

MAX_LINE = 8 * 1024

current_call: contextvars.ContextVar[int | None] = contextvars.ContextVar("sllm_call", default=None)
"""Number of the call whose code runs here. A thread that a function starts itself belongs to none."""

Emit = Callable[[int | None, str, str], None]


def own_loggers() -> tuple[logging.Logger, ...]:
    """Those of the platform, which tell nothing to the function's root logger."""
    loggers = tuple(map(logging.getLogger, ("sllm_runtime", "sllm_loaderd")))
    for logger in loggers:
        logger.propagate = False
        if logger.level != logging.INFO:  # a level that is set again has each logger there is look anew: 2 ms
            logger.setLevel(logging.INFO)
    return loggers


class LineWriter(io.TextIOBase):
    """A text stream that hands on whole lines: ``emit(call number, stream name, line)``. Thread-safe."""

    encoding = "utf-8"
    errors = "replace"

    def __init__(self, name: str, fd: int, emit: Emit, sent: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._sent = sent
        self._fd = fd
        self._emit = emit
        self._partial: dict[int | None, str] = {}
        # Reentrant: what a garbage collection runs under this lock may print, here in the midst of a ``write``.
        self._lock = threading.RLock()
        self.name, self.mode, self.line_buffering, self.write_through = f"<{name}>", "w", True, False

    @property
    def buffer(self) -> io.FileIO:
        """The pipe itself, for what writes bytes; the invoker reads that too. Nothing waits in it for a flush, and who
        closes it closes it for nobody else."""
        return io.FileIO(self._fd, "w", closefd=False)

    def reconfigure(self, **_: object) -> None:
        """Lines are lines, whatever a program would have of a terminal."""

    def leave(self) -> None:
        """In a forked child: from now on to the pipe. What had this stream before, as handlers of logging, still has
        it. Of what the parent's threads held nothing is ever released here."""
        self._lock = threading.RLock()
        self._partial.clear()
        self._emit, self._sent = self._to_pipe, self._rest_to_pipe

    def _to_pipe(self, _number: int | None, _name: str, line: str) -> None:
        self.buffer.write(f"{line}\n".encode(errors="replace"))

    def _rest_to_pipe(self) -> None:
        """What has no end yet, and may never have: nobody hands it on when the child ends."""
        with self._lock:
            rest = "".join(self._partial.values())
            self._partial.clear()
        if rest:
            self.buffer.write(rest.encode(errors="replace"))

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        number = current_call.get()
        with self._lock:
            *lines, rest = (self._partial.pop(number, "") + text).split("\n")
            while len(rest) > MAX_LINE:
                lines.append(rest[:MAX_LINE])
                rest = rest[MAX_LINE:]
            if rest:
                self._partial[number] = self._partial.get(number, "") + rest
        for line in lines:
            for start in range(0, max(len(line), 1), MAX_LINE):
                self._emit(number, self._name, line[start : start + MAX_LINE])
        return len(text)

    def flush(self) -> None:
        """Whole lines have left this process when this returns (or after a moment): they may be its last words."""
        self._sent()

    def end_call(self, number: int | None) -> None:
        """Hand on what a call wrote without a newline."""
        with self._lock:
            rest = self._partial.pop(number, "")
        if rest:
            self._emit(number, self._name, rest)


class Console:
    """Replaces ``sys.stdout`` and ``sys.stderr`` for the life of the process."""

    def __init__(self, emit: Emit, sent: Callable[[], None]) -> None:
        """``sent`` waits, not for long, until what was emitted is written."""
        self._writers = (LineWriter("stdout", 1, emit, sent), LineWriter("stderr", 2, emit, sent))

    def install(self) -> None:
        """From now on prints become log lines. The pipes 1 and 2 stay for what writes to them directly."""
        sys.stdout, sys.stderr = self._writers

    def leave(self) -> None:
        """Back to the pipes, which the invoker reads as well: in a child that user code forked."""
        for writer in self._writers:
            writer.leave()
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__

    def end_call(self, number: int | None) -> None:
        """Flush what this call wrote without a newline."""
        for writer in self._writers:
            writer.end_call(number)
