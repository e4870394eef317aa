"""Who may call: one bearer token on every route but the probes and the metrics."""

from __future__ import annotations

import hmac

from sllm_gateway.asgi import Scope, header
from sllm_runtime.protocol.errors import Unauthorized

OPEN = frozenset({"/livez", "/readyz", "/metrics"})


class Auth:
    """Checks a request's ``Authorization``. Without a token everybody may: then only loopback is listened on."""

    def __init__(self, token: str | None) -> None:
        self._expected = None if token is None else token.encode()

    def check(self, scope: Scope) -> None:
        """Raises ``Unauthorized``."""
        if self._expected is None or scope["path"] in OPEN:
            return
        given = header(scope, b"authorization") or b""
        scheme, _, token = given.partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("a bearer token is needed: send `Authorization: Bearer …`, or set SLLM_TOKEN")
        if not hmac.compare_digest(token.strip(), self._expected):
            raise Unauthorized("the bearer token is not the one of this platform; `sllm up` wrote it to the profile")
