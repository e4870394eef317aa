"""How a node shows another one that it has the cluster's token, and does not send it: the token signs each request,
for the address that it goes to.

A caller may name any host as a peer. Whoever answers there gets nothing that opens a node: what it could pass on is
signed for itself. What is overheard on the way asks for the same bytes again, for WINDOW_S.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
from dataclasses import dataclass
from typing import Any, Final

WINDOW_S: Final = 300
"""Longest time between a request's signing and its answer, so also how far the nodes' clocks may be apart."""
_SCHEME: Final = "SLLM-HMAC-SHA256"
_SHOWN: Final = re.compile(rf"{_SCHEME} (\d{{1,12}}) ([0-9a-f]{{64}})")


@dataclass(frozen=True, slots=True)
class Asked:
    """What is signed of a request. ``address`` is the server's, ``span`` the ``Range`` header."""

    method: str
    target: str
    span: str
    address: str

    def mac(self, token: str, at: int) -> str:
        """Of this request, asked ``at`` seconds since the epoch."""
        text = "\n".join((_SCHEME, str(at), self.method, self.target, self.span, self.address))
        return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def address_of(end: Any) -> str:
    """The address of a TCP socket's end (``getpeername``, ``getsockname``), the same as seen from either side."""
    host = ipaddress.ip_address(end[0].partition("%")[0])
    plain = host.ipv4_mapped if isinstance(host, ipaddress.IPv6Address) else None
    return f"{plain or host} port {end[1]}"


def authorization(token: str, asked: Asked, now: float) -> str:
    """The header that shows the token to whom is asked."""
    return f"{_SCHEME} {int(now)} {asked.mac(token, int(now))}"


def refusal(token: str, shown: str, asked: Asked, now: float) -> str:
    """Why a request is not served, empty: it is. Takes the same time whatever is ``shown``."""
    match = _SHOWN.fullmatch(shown)
    if match is None:
        return "it is not signed as this version signs"
    if not hmac.compare_digest(match[2], asked.mac(token, int(match[1]))):
        return f"it is signed with another token, or for another address than {asked.address}"
    if abs(ago := now - int(match[1])) > WINDOW_S:
        when = f"{-ago:.0f} s ahead of" if ago < 0 else f"{ago:.0f} s ago by"
        return f"it was signed {when} this node's clock, {WINDOW_S} are allowed"
    return ""
