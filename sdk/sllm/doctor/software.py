"""Python, what is installed, and the port of the gateway."""

from __future__ import annotations

import errno
import importlib.util
import platform
import socket
import sys
from typing import Final
from urllib.parse import urlsplit

from sllm import profiles
from sllm.doctor.finding import Finding, failure, ok, warning
from sllm_runtime.protocol.errors import InvalidRequest, SllmError

EXTRAS: Final = {
    "server": ("nats", "starlette", "uvicorn", "psutil", "prometheus_client"),
    "worker": ("torch", "transformers", "tokenizers", "safetensors"),
}
OLDEST, NEWEST = (3, 11), (3, 13)
OTHER: Final = "another one: --url and --token, SLLM_URL and SLLM_TOKEN"


def installed(extra: str) -> bool:
    """Whether everything that ``extra`` brings is here."""
    return not missing(extra)


def missing(extra: str) -> list[str]:
    """Modules of ``extra`` that are not here."""
    return [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]


def python() -> Finding:
    """The interpreter."""
    found = f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"
    if platform.python_implementation() != "CPython" or not OLDEST <= sys.version_info[:2] <= NEWEST:
        return failure("python", found, "use CPython 3.11, 3.12 or 3.13")
    return ok("python", found)


def extras() -> Finding:
    """What of the platform is installed."""
    here = [extra for extra in EXTRAS if installed(extra)]
    if len(here) == len(EXTRAS):
        return ok("installation", "client, server, worker")
    lacking = ", ".join(name for extra in EXTRAS for name in missing(extra))
    return warning(
        "installation",
        f"{', '.join(['client', *here])} (without {lacking})",
        "enough for clients; to run the platform here: pip install 'sllm[server,worker]'",
    )


def system() -> Finding:
    """The operating system."""
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        return ok("system", found)
    return warning("system", found, "clients work here; the platform itself runs on Linux")


def port() -> Finding:
    """Where `sllm up` listens, or the gateway that is there already."""
    where = urlsplit(profiles.DEFAULT_URL)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((where.hostname, where.port))
        except OSError as error:
            return _taken(error, where.port or 0)
    return ok("port", f"{where.port} is free")


def _taken(error: OSError, number: int) -> Finding:
    if error.errno == errno.EADDRINUSE and _is_ours():
        return ok("port", f"{number} is the gateway's, which answers")
    return warning("port", f"{number} cannot be used: {error.strerror}", "sllm up --port PORT (0: any free one)")


def _is_ours() -> bool:
    import httpx

    try:
        return httpx.get(f"{profiles.DEFAULT_URL}/livez", timeout=2.0, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def gateway(url: str | None = None, token: str | None = None, profile: str | None = None) -> Finding:
    """The platform that these name, as for ``Client``."""
    from pydantic import ValidationError

    from sllm.client import Client
    from sllm.retry import NEVER
    from sllm_runtime.protocol.http import API, StatusView

    try:
        client = Client(url, token, profile=profile, timeout=3.0, retry=NEVER)
    except InvalidRequest as error:  # no verb works until it is corrected
        return failure("gateway", error.message, "correct the flag, the variable or the file that it is from")
    try:
        with client:
            status = StatusView.model_validate(client.request("GET", f"{API}/status"))
    except SllmError as error:
        return warning("gateway", error.message, OTHER)
    except ValidationError:
        return warning("gateway", f"{client.url}: what answers there is no gateway of sllm", OTHER)
    where = f"{client.url}: version {status.version}, {status.nodes} node(s), {status.functions} function(s)"
    if not status.controller:
        return warning("gateway", f"{where}, no controller", "look at its log: <SLLM_HOME>/run/logs")
    return ok("gateway", where)
