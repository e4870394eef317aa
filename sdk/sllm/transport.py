"""What both clients do alike: settings of the connection, arguments as JSON, and errors of the transport as ours."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

import httpx
from pydantic_core import PydanticSerializationError, to_json

from sllm import profiles
from sllm.answers import Trace, broken_off
from sllm.profiles import Profile
from sllm_runtime.protocol.errors import InstanceLost, InvalidArgument, SllmError, Unavailable
from sllm_runtime.protocol.http import API, EVENT_STREAM
from sllm_runtime.protocol.manifest import NAME

JSON: Final = {"Content-Type": "application/json"}
# A proxy that compresses would also collect events before it lets them go.
SSE: Final = {"Accept": EVENT_STREAM, "Accept-Encoding": "identity"}
CONNECT_S: Final = 5.0
SILENCE_S: Final = 60.0
"""Heartbeats come every 10 s."""
WHOLE_S: Final = 86_400.0 + 60.0
"""An answer in one piece is silent until it is there: as long as the longest ``timeout`` of a manifest."""
NOT_HEARD: Final = (httpx.ConnectError, httpx.ConnectTimeout)
"""Nobody has seen a request that ended so: it may be sent anywhere again, whatever it does."""
LONGEST: Final = 255
"""What names anything on a platform has no more characters."""
_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")


def options(profile: Profile, timeout: float | None) -> dict[str, Any]:
    """Keyword arguments of an httpx client for ``profile``, but for its ``mounts``."""
    headers = {"Authorization": f"Bearer {profile.token}"} if profile.token else {}
    return {
        "headers": headers,
        "timeout": httpx.Timeout(timeout or SILENCE_S, connect=CONNECT_S),
        # A proxy of the environment is not asked for this machine: it would see the token.
        "trust_env": not any(_here(url) for url in profile.urls),
        "verify": secure(profile),
    }


def proxies() -> dict[str, str | None]:
    """The proxies that the environment names, by the pattern of httpx for what they are asked for; None: for nothing.
    httpx itself refuses every URL where NO_PROXY has an address in brackets or a network of IPv6."""
    found = getproxies()
    past = [each.strip() for each in found.get("no", "").split(",")]
    if "*" in past:
        return {}
    named = {f"{scheme}://": found[scheme] for scheme in ("http", "https", "all") if found.get(scheme)}
    ways: dict[str, str | None] = {at: way if "://" in way else f"http://{way}" for at, way in named.items()}
    return ways | {at: None for at in map(_pattern, filter(None, past)) if at}


def _pattern(past: str) -> str:
    """Of an entry of NO_PROXY, as httpx makes it; "": it can say nothing of it."""
    with suppress(ValueError):
        address = ipaddress.ip_address(past.strip("[]"))
        return f"all://[{address}]" if address.version == 6 else f"all://{address}"
    exact = past.startswith("[") or past.lower() == "localhost"
    pattern = past if "://" in past else f"all://{past}" if exact else f"all://*{past}"
    with suppress(httpx.InvalidURL):
        httpx.URL(pattern)
        return pattern
    return ""


def secure(profile: Profile) -> bool:
    """Whether certificates are checked: always where there are any. Reading the authorities takes 50 ms."""
    return any(urlsplit(url).scheme == "https" for url in profile.urls)


def _here(url: str) -> bool:
    return urlsplit(url).hostname in _LOOPBACK


def keepalive() -> list[tuple[int, int, int]]:
    """Socket options by which the kernel finds out that a silent peer has died."""
    wanted = {"TCP_KEEPIDLE": 30, "TCP_KEEPALIVE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    found = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
    for name, value in wanted.items():
        if hasattr(socket, name):
            found.append((socket.IPPROTO_TCP, getattr(socket, name), value))
    return found


def keeps_alive(event: str, info: Mapping[str, Any]) -> None:
    """A trace of httpcore's (extension of a request). Every new connection has these options, also one to a proxy or
    past it: httpx gives them to others only."""
    if event.endswith("connect_tcp.complete"):
        connection = info["return_value"].get_extra_info("socket")
        with suppress(OSError):  # it has ended already: whoever uses it is told so
            for option in keepalive():
                connection.setsockopt(*option)


async def keeps_alive_async(event: str, info: Mapping[str, Any]) -> None:
    """As ``keeps_alive``, for asyncio."""
    keeps_alive(event, info)


def chosen(url: str | None, token: str | None, profile: str | Profile | None) -> Profile:
    """The platform to talk to. Raises ``InvalidRequest``."""
    if isinstance(profile, Profile):
        return profile
    return profiles.load(profile, url=url, token=token)


def whole(timeout: float | None) -> httpx.Timeout:
    """Deadlines of an answer that comes in one piece."""
    return httpx.Timeout(SILENCE_S, read=timeout or WHOLE_S, connect=CONNECT_S)


def function_path(name: str, version: int | None) -> str:
    """Where it is called. Raises ``InvalidArgument`` for what is no function's name."""
    checked = _checked(name)
    return f"/fn/{checked}" if version is None else f"/fn/{checked}/{segment(f'v{version}', 'version')}"


def about(name: str) -> str:
    """Where the function ``name`` is described and looked after. Raises as ``function_path``."""
    return f"{API}/functions/{_checked(name)}"


def segment(word: str, kind: str) -> str:
    """``word``, which is to name a ``kind``, as one segment of a path. Raises as ``named``."""
    return quote(named(word, kind), safe="")


def named(word: str, kind: str) -> str:
    """``word``, where it can name a ``kind``. Raises ``InvalidArgument``. Nothing else goes into a path: ``../x`` and
    ``x/events`` would ask for something else."""
    if not (0 < len(word) <= LONGEST and word.isprintable()) or word in (".", "..") or "/" in word:
        raise InvalidArgument(
            f"{word!a:.100} names no {kind}: what does is printable text without '/', neither '.' nor '..', "
            f"at most {LONGEST} characters",
            field=kind,
        )
    return word


def _checked(name: str) -> str:
    """A function's: narrower than ``named``."""
    if not NAME.fullmatch(name):
        raise InvalidArgument(
            f"{name!a:.100} is no function's name: lower-case letters, digits and '-', beginning with a letter, "
            "at most 63; `sllm fn list` names those that there are",
            field="name",
        )
    return name


def encoded(arguments: Mapping[str, Any]) -> bytes:
    """A call's body; dataclasses, pydantic models, dates and the like become their JSON. Raises ``InvalidArgument``."""
    if not isinstance(arguments, Mapping):
        raise InvalidArgument(f"a call's arguments are a dict of them by name, not {arguments!r:.80}")
    parts = [_name(str(name)) + b":" + _value(str(name), value) for name, value in arguments.items()]
    return b"{" + b",".join(parts) + b"}"


def _name(name: str) -> bytes:
    try:
        return to_json(name)
    except (PydanticSerializationError, UnicodeError) as error:
        raise InvalidArgument(f"{name!a:.100} is no argument's name: it is no UTF-8", field=ascii(name)) from error


def _value(name: str, value: Any) -> bytes:
    try:
        found = to_json(value, inf_nan_mode="strings")
        if (b'NaN"' in found or b'Infinity"' in found) and found != to_json(value, inf_nan_mode="constants"):
            raise InvalidArgument(f"{name}: JSON has no NaN and no infinity; send None instead", field=name)
        return found
    except (PydanticSerializationError, UnicodeError) as error:
        raise InvalidArgument(f"{name}: {error}; arguments travel as JSON", field=name) from error


def failed(url: str, error: httpx.HTTPError, trace: Trace | None = None) -> SllmError:
    """The typed error for a request that got no answer, or half of one (``trace``: of a call)."""
    if isinstance(error, (*NOT_HEARD, httpx.PoolTimeout)):
        return unreached([url], error)
    if trace is not None and trace.call is not None:
        return broken_off(trace, reason(error))
    why = reason(error)
    return InstanceLost(f"the connection to {url} broke off before an answer came ({why}); it may have been done")


class Unreached(Unavailable):
    """No gateway took the connection: nobody has heard of the request."""


def unreached(urls: Sequence[str], error: httpx.HTTPError) -> Unreached:
    """None of ``urls`` took the connection; ``error``: what came of the last."""
    start = "; `sllm up` starts one here" if all(map(_here, urls)) else ""
    return Unreached(f"no gateway answers at {' or '.join(urls)} ({reason(error)}){start}")


def reason(error: httpx.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")
