"""Run a function in this process. The machinery is the worker's, found by its entry points (group ``sllm.local``).

``call(function, arguments)`` gives the whole answer; ``stream(function, arguments, report)`` is a context manager of an
iterator of values, whose ``report`` hears ``(stage, done, total)``; ``error(exception)`` is what a call that raised in
the user's code is for a command line.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sllm_runtime.protocol.errors import SllmError, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sllm.answers import Observe
    from sllm.function import ModelFunction

GROUP: Final = "sllm.local"
EXTRA: Final = "server,worker"


def run_local(function: ModelFunction[Any, Any, Any], arguments: dict[str, Any]) -> Any:
    """The whole answer of one call (a list for a generator).

    Raises the user's own exception, ``InvalidArgument``, or ``Unavailable`` where the worker is not installed.
    """
    return _worker("call")(function, arguments)


def stream_local(
    function: ModelFunction[Any, Any, Any], arguments: dict[str, Any], observe: Observe
) -> AbstractContextManager[Iterator[Any]]:
    """The values of one call as they come. Raises as ``run_local``."""
    from sllm_runtime.protocol.http import ProgressView

    def report(stage: str, done: int, total: int) -> None:
        observe(ProgressView(stage=stage, done=done, total=total))

    values: AbstractContextManager[Iterator[Any]] = _worker("stream")(function, arguments, report)
    return values


def user_error(error: BaseException, source: Path | None = None) -> SllmError:
    """What a local call raised, as a command line shows it; the user's part of the traceback, which begins in
    ``source``, is its ``detail``."""
    trace = error.__traceback__
    while trace is not None and (source is None or Path(trace.tb_frame.f_code.co_filename).resolve() != source):
        trace = trace.tb_next
    shown: SllmError = _worker("error")(error.with_traceback(trace or error.__traceback__))
    return shown


def _worker(name: str) -> Any:
    found = entry_points(group=GROUP, name=name)
    try:
        for point in found:
            return point.load()
    except ModuleNotFoundError as error:
        raise lacking("running a function here", error, EXTRA) from error
    raise Unavailable(f"running a function here needs the worker: pip install 'sllm[{EXTRA}]'")


_UNIX: Final = ("fcntl", "grp", "pwd", "resource", "termios")
"""What a Python of another system has not, however it was built."""


def lacking(what: str, error: ModuleNotFoundError, extra: str) -> Unavailable:
    """That ``what`` needs a module that ``extra`` brings, or that no package does: one of Python's own which it does
    not have on this system."""
    name = str(error.name).partition(".")[0]
    if name in sys.stdlib_module_names:
        if name not in _UNIX:  # as one that was built where libffi or lzma was not
            return Unavailable(f"{what} needs {name}, which this Python was built without; use another one")
        return Unavailable(f"{what} works on Linux only: Python has no {name} on this system")
    return Unavailable(f"{what} needs {name}, which is not installed: pip install 'sllm[{extra}]'")
