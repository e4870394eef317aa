"""The program's stdin, stdout and stderr, whatever they lead to: a full disk, a pipe without a reader, nowhere."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterator

from sllm_runtime.protocol.errors import InvalidArgument


class Closed(BrokenPipeError):
    """The reader of stdout has gone: not one of another pipe, as users' code may have."""


class Results(io.TextIOWrapper):
    """stdout, for everything that writes to it: results, help, other rooms' verbs. What it does not take is an error
    of its own; a pipe without a reader is ``Closed``."""

    def write(self, text: str, /) -> int:
        with _said():
            return super().write(text)

    def flush(self) -> None:
        with _said():
            super().flush()


class Notes(io.TextIOWrapper):
    """stderr: where it takes nothing there is nobody to tell, and what was asked for is done all the same."""

    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def prepare() -> None:
    """Make the program's streams these. Text that a terminal's encoding lacks is written as an escape.

    What was closed (``>&-``) leads nowhere: results are not wanted then, and no socket may get its descriptor.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - for the life of the program
    with _uninterrupted():  # between two streams there is none
        _replace("stdout", Results)
        _replace("stderr", Notes)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGALRM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _replace(name: str, kind: type[io.TextIOWrapper]) -> None:
    stream = getattr(sys, name)
    if type(stream) is io.TextIOWrapper:  # anything else was put there by who runs this in a process of its own
        encoding, lines = stream.encoding, stream.line_buffering
        made = kind(stream.detach(), encoding=encoding, errors="backslashreplace", line_buffering=lines)
        setattr(sys, name, made)


def close_stdout() -> None:
    """stdout takes nothing any more: keep the interpreter from complaining about it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextlib.contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise Closed(*error.args) from error
    except OSError as error:
        close_stdout()
        raise InvalidArgument(
            f"the result cannot be written to stdout ({error.strerror}), and what was asked for may be done; "
            "make room where stdout leads, or lead it elsewhere",
            field="stdout",
        ) from error
