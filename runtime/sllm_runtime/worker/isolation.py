"""What a function cannot reach: the platform's own files, the network where its manifest does not ask for it, and the
privileges of the user it runs as. Linux only.

``hide`` is for the fork server, once, in a mount namespace of its own: its workers inherit what it sees, so that it
costs a start nothing. So is ``forbid_namespaces``, in a user namespace of its own. ``leave_network``, ``enter_network``
and ``drop_privileges`` are for a worker that has its assignment, while it has one thread: each holds for the calling
thread and those it starts.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import Final

_CLONE_NEWNET: Final = 0x40000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 0x1, 0x2, 0x4, 0x8, 0x20, 0x1000
_EMPTY: Final = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4
_CAPABILITY_VERSION_3: Final = 0x20080522
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, data)]
    _check(_libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]), f"mount on {target}")


# --- the fork server ------------------------------------------------------------------------------
def hide(paths: Iterable[Path], keep: Iterable[Path]) -> list[Path]:
    """Put an empty directory (or file) over each of ``paths``, but for the directories ``keep`` below them.

    Returns those that were not hidden because this Python runs from below them. Raises ``OSError``.
    """
    needed = _running_from()
    os.chdir("/")  # what was the working directory would still lead there
    kept = {os.path.realpath(path): os.open(path, os.O_PATH | os.O_CLOEXEC) for path in keep if path.is_dir()}
    hidden: list[str] = []
    refused: list[Path] = []
    try:
        for path in sorted({Path(os.path.realpath(path)) for path in paths}, key=lambda path: len(path.parts)):
            if any(place.is_relative_to(path) for place in needed):
                refused.append(path)
            elif path.is_dir():
                _mount("tmpfs", str(path), "tmpfs", _EMPTY, "size=1m,mode=0755")
                hidden.append(str(path))
            elif path.exists():
                _mount("/dev/null", str(path), None, _MS_BIND)
        for name, fd in kept.items():
            if any(Path(name).is_relative_to(path) for path in hidden):
                os.makedirs(name, exist_ok=True)
                _mount(f"/proc/self/fd/{fd}", name, None, _MS_BIND)
        for name in hidden:
            _mount("none", name, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _EMPTY)
        os.chdir(next(iter(kept), "/"))
    finally:
        for fd in kept.values():
            os.close(fd)
    return refused


def _running_from() -> set[Path]:
    """Where modules may still be imported from. ``python -m`` has the working directory among them: the data's own."""
    here = os.path.realpath(".")
    places = [sys.prefix, sys.base_prefix, sys.executable, __file__]
    places += [place for place in sys.path if place and os.path.realpath(place) != here]
    return {Path(os.path.realpath(place)) for place in places}


def forbid_namespaces() -> None:
    """Nobody makes user namespaces within this process's own: there a function would have all rights, and could use up
    the network namespaces that its user may have, which the workers to come need. Only for who has a user namespace of
    its own. Raises ``OSError``."""
    Path("/proc/sys/user/max_user_namespaces").write_text("0")


# --- a worker -------------------------------------------------------------------------------------
def leave_network() -> bool:
    """Go to a network namespace that has a loopback of its own and nothing else: connections beyond it end with
    ``ENETUNREACH``. False where the kernel does not permit it."""
    if _libc.unshare(_CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock, contextlib.suppress(OSError):
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP | _IFF_RUNNING))
    return True


def enter_network(fd: int) -> bool:
    """Go to the network namespace behind ``fd``. False where the kernel does not permit it."""
    return bool(_libc.setns(fd, _CLONE_NEWNET) == 0)


def leave_network_for_now() -> int | None:
    """``leave_network``, which takes a millisecond, before it is known whether the function may have the network. What
    was left, for ``enter_network``, while it has its privileges; the caller closes it. None where nothing was left."""
    fd = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    if leave_network():
        return fd
    os.close(fd)
    return None


class Leave(IntEnum):
    """Whether a worker can leave the network, and come back: not where its user namespace has no rights to it."""

    NEVER = 1
    FOR_GOOD = 2
    FOR_NOW = 3


def leave() -> Leave:
    """Which it is here; tried in a child."""
    pid = os.fork()
    if pid == 0:
        left = leave_network_for_now()
        found = Leave.NEVER if left is None else Leave.FOR_NOW if enter_network(left) else Leave.FOR_GOOD
        os._exit(found)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return Leave(code) if code in tuple(Leave) else Leave.NEVER


def drop_privileges() -> None:
    """Give up every capability, now and after any ``exec``: mounts stay as they are, and the fork server, which has
    them, cannot be traced. Raises ``OSError``."""
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:  # the first that there is not ends it
        capability += 1
    header = struct.pack("Ii", _CAPABILITY_VERSION_3, 0)
    _check(_libc.capset(header, struct.pack("6I", *[0] * 6)), "capset")
