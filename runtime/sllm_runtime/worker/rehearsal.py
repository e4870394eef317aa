"""A start of a function that does nothing, in a worker that is thrown away: the pages that it touches all starts do
(``working_set``), so that the first of a node has them as well."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from typing import Final, NoReturn

from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.errors import SllmError
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.worker import Assign, FromWorker, Ready, ToWorker
from sllm_runtime.worker.working_set import WorkingSet

GIVE_UP_S: Final = 10.0
"""Of all of it: 60 ms on an idle machine."""
NAME: Final = "rehearsed"


def rehearse(working_set: WorkingSet, become: Callable[[list[int], int, Callable[[], float]], NoReturn]) -> None:
    """Record one. ``become`` makes a child a worker, whose invoker this process is meanwhile. Without one the first
    starts are slower: nothing is raised, stderr says so."""
    try:
        with tempfile.TemporaryDirectory(prefix="sllm-rehearsal-") as workdir:
            _record(working_set, become, workdir)
    except (OSError, SllmError) as error:
        sys.stderr.write(f"no start could be rehearsed, a node's first ones are slower: {error}\n")


def _record(
    working_set: WorkingSet, become: Callable[[list[int], int, Callable[[], float]], NoReturn], workdir: str
) -> None:
    """Raises ``OSError``, ``SllmError``."""
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    with contextlib.closing(BlockingWire(ours)) as invoker:
        with theirs:
            pid = os.fork()
            if pid == 0:
                become([theirs.fileno(), 1, 2], parent, lambda: 0.0)
        ours.settimeout(GIVE_UP_S)
        try:
            _start(invoker, workdir)
            working_set.look(pid)
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start(invoker: BlockingWire, workdir: str) -> None:
    """Until it is ready. Raises ``OSError`` (``TimeoutError`` after GIVE_UP_S), ``SllmError``."""
    until = time.monotonic() + GIVE_UP_S
    manifest = Manifest(name=NAME, handler=Handler(entry=f"{NAME}:fn", kind="function", streams=False))
    assign = Assign(
        instance=NAME, function=NAME, version=1, manifest=manifest, bundle="", workdir=workdir, threads=1, fds=1
    )
    bundle = _bundle()
    try:
        invoker.send(codec.pack(ToWorker(assign)), [bundle])
    finally:
        os.close(bundle)
    while (payload := _received(invoker, until)) is not None:
        if isinstance(codec.unpack(FromWorker, payload).body, Ready):
            return
    raise ConnectionError("its worker has ended")


def _received(invoker: BlockingWire, until: float) -> bytes | None:
    """The next message. One that never is ready beats all the same, so no read is given more than what is left."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    invoker.sock.settimeout(left)
    return invoker.receive()


def _bundle() -> int:
    """A descriptor of it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"{NAME}.py", "def fn(text: str = '') -> str:\n    return text\n")
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.write(fd, packed.getvalue())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
