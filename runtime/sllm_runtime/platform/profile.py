"""``profiles.toml``: how the CLI and the SDK find the platform that ``sllm up`` started. Mode 0600: it holds tokens."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import ipaddress
import itertools
import os
import re
import socket
import time
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from sllm_runtime.platform.nats_server import write_private
from sllm_runtime.protocol.errors import Conflict, Unavailable
from sllm_runtime.protocol.profiles import LOCK_FILE, PROFILES_FILE, toml

DEFAULT: Final = "default"
LOCK_S: Final = 30.0
_AGAIN_S: Final = 0.02
_ANSWER_S: Final = 2.0


def free_name(home: Path, asked: str, url: str, data: Path, alive: Callable[[str], bool]) -> str:
    """``asked``, or where that is the profile of another platform, a name after the directory ``data``.

    What leads to another machine stays, whether it answers or not: its token is stored nowhere else. Of this machine's
    platforms one that was asked for by name gives way, any other where it is not ``alive``. Raises ``Conflict`` if the
    file there cannot be read.
    """
    known = {name: str(each.get("url", "")) for name, each in _read(home / PROFILES_FILE).get("profiles", {}).items()}
    own = re.sub(r"[^A-Za-z0-9._]+", "-", data.name).strip("-") or "platform"

    def is_free(name: str) -> bool:
        there = known.get(name, url)
        return there == url or (_is_here(there) and (name == asked != DEFAULT or not alive(there)))

    return next(filter(is_free, itertools.chain((asked, own), (f"{own}-{number}" for number in itertools.count(2)))))


def _is_here(url: str) -> bool:
    """Whether ``url`` leads to this machine; one without a host stands for the gateway that is asked by default.

    Other names are another machine's: who could tell is out of reach for as long as the VPN is gone.
    """
    try:
        host = urlsplit(url).hostname or "localhost"
        return host in ("localhost", socket.gethostname().lower()) or _is_own(ipaddress.ip_address(host))
    except ValueError:  # a name, or no URL
        return False


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether this machine has it: then somebody can listen there, as ``sllm up --host`` does."""
    if address.is_loopback:
        return True
    try:
        with socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6) as probe:
            probe.bind((str(address), 0))
    except OSError:
        return False
    return True


def answers_alive(url: str) -> bool:
    """Whether a gateway at ``url``, of this machine, answers ``GET /livez`` with 200 within 2 s."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(f"{url}/livez", timeout=_ANSWER_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, http.client.HTTPException):  # nobody, no gateway, or no URL
        return False


def claim(
    home: Path,
    asked: str,
    url: str,
    token: str,
    data: Path,
    alive: Callable[[str], bool],
    urls: tuple[str, ...] = (),
) -> str:
    """Write the profile of the platform at ``url``, which answers already, with ``urls`` of all its gateways, under its
    ``free_name``, which is given back. Two that claim at once take turns. Raises ``Conflict``, ``Unavailable`` after
    LOCK_S."""
    with _turn(home):
        name = free_name(home, asked, url, data, alive)
        write_profile(home, name, url, token, urls)
    return name


def release(home: Path, name: str, url: str, token: str) -> None:
    """``remove_token`` in turn. Raises as ``claim``."""
    with _turn(home):
        remove_token(home, name, url, token)


@contextlib.contextmanager
def _turn(home: Path) -> Iterator[None]:
    fd = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        until = time.monotonic() + LOCK_S
        while not _locked(fd):
            if time.monotonic() > until:
                raise Unavailable(f"{home / 'profiles.lock'} has been held for {LOCK_S:g} s; `fuser` says by whom")
            time.sleep(_AGAIN_S)  # flock itself has no deadline
        yield
    finally:
        os.close(fd)


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write_profile(home: Path, name: str, url: str, token: str, urls: tuple[str, ...] = ()) -> Path:
    """Set profile ``name``; others stay. Returns the file. Raises ``Conflict`` if the file there cannot be read."""
    path = home / PROFILES_FILE
    document = _read(path)
    profiles = document.setdefault("profiles", {})
    kept = {key: value for key, value in profiles.get(name, {}).items() if key != "urls"}
    profiles[name] = {**kept, "url": url, "token": token} | ({"urls": list(urls)} if len(urls) > 1 else {})
    write_private(path, toml(document))
    return path


def remove_token(home: Path, name: str, url: str, token: str) -> None:
    """Take profile ``name`` away if it is still that of ``url`` with ``token``, which opens nothing any more: another
    platform may have the port by now."""
    path = home / PROFILES_FILE
    document = _read(path)
    profiles = document.get("profiles", {})
    there = profiles.get(name, {})
    if (there.get("url"), there.get("token")) == (url, token):
        del profiles[name]
        write_private(path, toml(document))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise Conflict(f"{path} cannot be read ({error}); correct or remove it") from error
