"""A parent for the test process that adopts every orphan, so that none can slip away to init unseen.

`adopt` forks. The child goes on as the test process; the parent becomes a child subreaper (prctl(2)) that reaps
what its descendants abandon, hands signals on, and leaves with the test process's exit status. A process whose
parent was killed is then found as a child of `PARENT` instead of somewhere among everybody's.
"""

import ctypes
import os
import shutil
import signal
import sys
import tempfile

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HANDED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
GRACE_SECONDS = 5
ON_LINUX = sys.platform == "linux"


def adopt() -> str:
    """Put a reaper between this process and its parent; returns the folder that is its TMPDIR from now on.

    The folder, and processes still there at the end, go when the test process has gone. Call while there is one
    thread. Linux only: elsewhere there is no reaper, and the folder stays to the system's own tidying.
    """
    folder = tempfile.mkdtemp(prefix="st-")
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    if ON_LINUX:
        _fork(folder)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = folder
    return folder


def _fork(folder: str) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        return
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the test process as well
    for number in HANDED_ON:
        signal.signal(number, lambda received, _: os.kill(child, received))
    status = _reap_until(child)
    _kill_the_rest()
    shutil.rmtree(folder, ignore_errors=True)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)  # as a shell tells of a signal


def _reap_until(child: int) -> int:
    """Reap every child that ends; returns the wait status of `child` when its turn comes."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return status


def _kill_the_rest() -> None:
    """Kill what the test process left, each by its own id, and reap it."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(GRACE_SECONDS)  # a process that not even SIGKILL ends must not hold up the run
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            return


def _children() -> list[int]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(name))
    return found
