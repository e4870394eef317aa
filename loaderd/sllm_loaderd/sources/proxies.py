"""The proxy that the environment names for what a source asks, as for boto3 and the hub's library: ``HTTPS_PROXY``,
``HTTP_PROXY``, ``ALL_PROXY``, ``NO_PROXY``, in either case."""

from __future__ import annotations

import ipaddress
import socket
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment, proxy_bypass

_MOST: Final = 16 * 1024


@dataclass(frozen=True, slots=True)
class Proxy:
    host: str
    port: int
    headers: Mapping[str, str] = field(repr=False)
    """That say who asks; for the proxy alone."""

    def tunnel(self, plain: socket.socket, host: str, port: int) -> None:
        """Have what follows on ``plain`` go to ``host``. Raises ``OSError``."""
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        lines = [f"CONNECT {at} HTTP/1.1", f"Host: {at}", *(f"{k}: {v}" for k, v in self.headers.items())]
        plain.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        head = b""
        while b"\r\n\r\n" not in head:  # nothing follows it before we have begun with TLS
            more = plain.recv(4096)
            if not more or len(head) > _MOST:
                raise ConnectionResetError(f"the proxy {self.host}:{self.port} gave no answer to CONNECT")
            head += more
        status = head.split(b"\r\n", 1)[0].split(b" ")[1:2]
        if not status or not status[0].startswith(b"2"):
            told = head.split(b"\r\n", 1)[0][:80].decode("latin-1")
            raise ConnectionRefusedError(f"the proxy {self.host}:{self.port} answers CONNECT with {told!a}")


def proxy_for(secure: bool, host: str, port: int) -> Proxy | None:
    """``None``: it is asked directly, as this machine always is. Raises ``OSError`` for one that cannot be used."""
    found = getproxies_environment()
    own, every = found.get("https" if secure else "http"), found.get("all", "")
    usable = "://" not in every or every.lower().startswith("http://")  # boto3, for one, does not look at it
    address = own or (every if usable else "")
    if not address or _here(host) or proxy_bypass(f"{host}:{port}", found):
        return None
    try:
        parts = urlsplit(address if "://" in address else f"http://{address}")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError
        at = parts.port or 80
    except ValueError:
        raise OSError("the proxy that the environment names is none of the form http://host:port") from None
    who = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    says = {"Proxy-Authorization": f"Basic {b64encode(who.encode()).decode()}"} if parts.username else {}
    return Proxy(parts.hostname, at, says)


def _here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
