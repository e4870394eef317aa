"""Who may call: one bearer token on every route but the probes and the metrics."""

from __future__ import annotations

import hmac

from sllm_gateway.asgi import Scope, header
from sllm_runtime.protocol.errors import Unauthorized

OPEN = frozenset({b"/livez", b"/readyz", b"/metrics"})
"""As they are asked for: a load balancer that keeps some of them from its clients knows them in no other spelling."""


class Auth:
    """Checks a request's ``Authorization``. Without a token everybody may: then only loopback is listened on."""

    def __init__(self, tokens: str | None) -> None:
        """``tokens``: one a line, each as good as the others."""
        lines = map(str.strip, tokens.splitlines()) if tokens is not None else None
        self._expected = [line.encode() for line in lines if line] if lines is not None else None

    def check(self, scope: Scope) -> None:
        """Raises ``Unauthorized``. A token that is shown is looked at on every route: a load balancer may ask for any
        where it does not ask for the right one."""
        given = header(scope, b"authorization")
        if self._expected is None or (given is None and scope["raw_path"] in OPEN):
            return
        scheme, _, token = (given or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("a bearer token is needed: send `Authorization: Bearer …`, or set SLLM_TOKEN")
        # Each of them is compared: how long it takes does not tell which one was nearly right.
        if not sum([hmac.compare_digest(token.strip(), each) for each in self._expected]):
            raise Unauthorized("the bearer token is not the one of this platform; `sllm up` wrote it to the profile")
