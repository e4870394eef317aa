"""A start of a function that does nothing, in a child of the fork server that is thrown away: the pages that it touches
all starts do (``working_set``), so that the first of a node has them as well."""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import traceback
import zipfile
from typing import Final, NoReturn

from sllm_runtime.platform.process import die_with_parent, lead_group
from sllm_runtime.platform.wire import BlockingWire
from sllm_runtime.protocol import codec
from sllm_runtime.protocol.manifest import Handler, Manifest
from sllm_runtime.protocol.worker import Assign, FromWorker, Ready, ToWorker
from sllm_runtime.worker.main import Worker
from sllm_runtime.worker.working_set import WorkingSet

GIVE_UP_S: Final = 5.0
NAME: Final = "rehearsed"


def rehearse(working_set: WorkingSet) -> None:
    """Record one. Without, the first starts are slower: nothing is raised, stderr says so."""
    parent = os.getpid()
    told, tell = os.pipe2(os.O_CLOEXEC)
    with tempfile.TemporaryDirectory(prefix="sllm-rehearsal-") as workdir:
        pid = os.fork()
        if pid == 0:
            _perform(parent, tell, workdir)
        os.close(tell)
        try:
            readable, _, _ = select.select([told], [], [], GIVE_UP_S)
            if readable and os.read(told, 1):
                working_set.look(pid)
            else:
                sys.stderr.write("no start could be rehearsed: a node's first starts are slower\n")
        finally:
            os.close(told)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _perform(parent: int, tell: int, workdir: str) -> NoReturn:
    """In the child: a worker, and a thread that is its invoker until it is ready. It is killed then."""
    try:
        lead_group()
        die_with_parent(signal.SIGKILL, parent)
        ours, theirs = socket.socketpair()
        invoker = BlockingWire(theirs)
        invoker.send(codec.pack(ToWorker(_assignment(workdir))), [_bundle()])
        threading.Thread(target=_attend, args=(invoker, tell), daemon=True).start()
        Worker(BlockingWire(ours)).run(0.0)
    except BaseException as error:  # nothing may return into the fork server
        os.write(2, "".join(traceback.format_exception(error)).encode())
    finally:
        os._exit(1)


def _attend(invoker: BlockingWire, tell: int) -> None:
    while (payload := invoker.receive()) is not None:
        if isinstance(codec.unpack(FromWorker, payload).body, Ready):
            os.write(tell, b"r")


def _assignment(workdir: str) -> Assign:
    manifest = Manifest(name=NAME, handler=Handler(entry=f"{NAME}:fn", kind="function", streams=False))
    return Assign(
        instance=NAME, function=NAME, version=1, manifest=manifest, bundle="", workdir=workdir, threads=1, fds=1
    )


def _bundle() -> int:
    """A descriptor of it."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(f"{NAME}.py", "def fn(text: str = '') -> str:\n    return text\n")
    fd = os.memfd_create(NAME, os.MFD_CLOEXEC)
    os.write(fd, packed.getvalue())
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
