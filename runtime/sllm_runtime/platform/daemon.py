"""The frame around each daemon's main: name, loop, signals, readiness, and an end with the parent."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable

from sllm_runtime.platform import descriptors
from sllm_runtime.platform.process import PARENT, die_with_parent, set_title
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger(__name__)

READY_FD = "SLLM_READY_FD"
READY = b"READY\n"
READY_MOST = 2048
"""Bytes of READY and the note behind it: one write, which a pipe takes whole."""
FORCED = 130


def run_daemon(
    main: Callable[[asyncio.Event], Awaitable[None]], *, title: str, files: int = descriptors.OF_DAEMON
) -> int:
    """Run ``main(stop)`` until it returns; SIGTERM and SIGINT set ``stop``, a second one ends the process at once.

    Returns the exit status: 0, or 1 after an error, which is logged. Ends with the parent process (SIGKILL). It and
    what it starts may open as many as ``files``.
    """
    parent = os.environ.get(PARENT)
    die_with_parent(signal.SIGKILL, int(parent) if parent else None)
    set_title(title)
    descriptors.allow(files)
    descriptors.make_room(descriptors.AT_ONCE)
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_run(main))
    except SllmError as error:
        log.critical("%s ends: %s", title, error.message)
        sys.stderr.write(f"{title}: {error.message}\n")
        return 1
    except Exception:
        log.critical("%s ends by a bug", title, exc_info=True)
        return 1
    return 0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's event loop where it is installed; None: asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _collect_rarely() -> None:
    """What is imported stays for good; messages are freed by their reference counts. A thousand open calls are many
    live objects, which Python's defaults would have the collector walk through every few hundred messages."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


async def _run(main: Callable[[asyncio.Event], Awaitable[None]]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if stop.is_set():
            os._exit(FORCED)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    _collect_rarely()
    await main(stop)


def ready(note: str = "") -> None:
    """Tell the supervisor, if there is one, that this daemon serves, and what a person who starts it should know. Once;
    later calls do nothing."""
    number = os.environ.pop(READY_FD, "")
    if not number:
        return
    with contextlib.suppress(OSError):
        os.write(int(number), (READY + note.encode())[:READY_MOST])
    with contextlib.suppress(OSError):
        os.close(int(number))
