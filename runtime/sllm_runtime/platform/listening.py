"""Listening on what a person has named: an address, or a name that stands for one or several of this machine's."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

Choice: TypeAlias = tuple[int, int, int]
"""Level, option and value, as ``setsockopt`` takes them."""
_NOBODYS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
"""An address of another machine, or of a family that this kernel does not have."""
_TRIES: Final = 5


def bound(host: str, port: int, choices: Iterable[Choice] = ()) -> list[socket.socket]:
    """A socket for each address of this machine that ``host`` stands for, bound to ``port`` and not listening yet.

    Which family of addresses a caller comes by is his resolver's choice, so a name is heard at all that it has here;
    its first one is: there who is on this machine looks for it. ``port`` 0: any free one, the same at all of them.
    Raises ``OSError``: one of ``is_nobodys`` where it is another machine's.
    """
    for left in reversed(range(_TRIES)):
        try:
            return _all(host, port, choices)
        except OSError as error:
            if port or not left or error.errno != errno.EADDRINUSE:  # what is free at one may not be at the next
                raise
    raise AssertionError("the last try ends")


def _all(host: str, port: int, choices: Iterable[Choice]) -> list[socket.socket]:
    found: list[socket.socket] = []
    nobodys: OSError | None = None
    try:
        for family, address in _addresses(host, port):
            try:
                found.append(_bound(family, (address[0], port, *address[2:]), choices))
            except OSError as error:
                if error.errno not in _NOBODYS or (error.errno == errno.EADDRNOTAVAIL and not found):
                    raise
                nobodys = error
            else:
                port = found[-1].getsockname()[1]
    except BaseException:
        for made in found:
            made.close()
        raise
    if not found:
        raise nobodys or OSError(errno.EADDRNOTAVAIL, "it stands for no address")
    return found


def is_nobodys(error: OSError) -> bool:
    """Whether it says that ``host`` stands for no address of this machine."""
    return isinstance(error, socket.gaierror) or error.errno in _NOBODYS


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # what is no name is none of a resolver's errors
        raise socket.gaierror(socket.EAI_NONAME, str(error)) from error
    return list(dict.fromkeys((int(each[0]), each[4]) for each in found))


def _bound(family: int, address: tuple[Any, ...], choices: Iterable[Choice]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in choices:
            made.setsockopt(level, option, value)
        made.bind(address)
    except BaseException:
        made.close()
        raise
    return made
