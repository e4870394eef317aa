"""Who may call: one bearer token on every route but the probes and the metrics."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sllm_gateway.asgi import Scope, header
from sllm_runtime.platform.replaced import stamps
from sllm_runtime.protocol.errors import SllmError, Unauthorized

log = logging.getLogger(__name__)

LOOKS_S: Final = 1.0
"""Between two looks at whether the file of tokens is another one."""

OPEN = frozenset({b"/livez", b"/readyz", b"/metrics"})
"""As they are asked for: a load balancer that keeps some of them from its clients knows them in no other spelling."""


class Auth:
    """Checks a request's ``Authorization``. Without a token everybody may: then only loopback is listened on."""

    def __init__(
        self, tokens: str | None, file: Path | None = None, read: Callable[[], str | None] | None = None
    ) -> None:
        """``tokens``: one a line, each as good as the others. ``read`` says those of ``file`` once that has changed: a
        token that was taken out of it is none from then on. While there is none in it those of before stay."""
        self._expected = _lines(tokens)
        self._file, self._read = file, read
        self._seen = self._told = stamps(file)
        self._looked = time.monotonic()

    def _look(self) -> None:
        if self._read is None or time.monotonic() - self._looked < LOOKS_S:
            return
        self._looked = time.monotonic()
        if (now := stamps(self._file)) == self._seen:
            return
        try:
            self._expected = _lines(self._read())
        except (SllmError, ValueError) as error:  # it is looked at again: rights that come later are not of its stamp
            if now != self._told:
                log.error("%s; the tokens of before stay", error)
            self._told = now
            return
        self._seen = self._told = now
        log.info("tokens were read anew from %s: %d", self._file, len(self._expected or ()))

    def check(self, scope: Scope) -> None:
        """Raises ``Unauthorized``. A token that is shown is looked at on every route: a load balancer may ask for any
        where it does not ask for the right one."""
        self._look()
        given = header(scope, b"authorization")
        if self._expected is None or (given is None and scope["raw_path"] in OPEN):
            return
        scheme, _, token = (given or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            raise Unauthorized("a bearer token is needed: send `Authorization: Bearer …`, or set SLLM_TOKEN")
        # Each of them is compared: how long it takes does not tell which one was nearly right.
        if not sum([hmac.compare_digest(token.strip(), each) for each in self._expected]):
            raise Unauthorized("the bearer token is not the one of this platform; `sllm up` wrote it to the profile")


def _lines(tokens: str | None) -> list[bytes] | None:
    lines = map(str.strip, tokens.splitlines()) if tokens is not None else None
    return [line.encode() for line in lines if line] if lines is not None else None
