"""What both clients are made of: the profile, the deadlines, the retries, and a pool of connections of either kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import httpx

from sllm import transport
from sllm.gateways import Gateways
from sllm.profiles import Profile
from sllm.retry import Retry
from sllm_runtime.protocol.errors import InvalidRequest, SllmError

Pool = TypeVar("Pool", httpx.Client, httpx.AsyncClient)
LIMITS: Final = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""As many connections as streams: one that waited for another's end would count as a gateway that is silent."""
RESTING: Final = 16
"""Event loops that do not run and whose connections are kept: nobody says that one will never run again."""
ABREAST: Final = 100
"""Answers in one piece, of calls and of requests, that a client waits for at once: the rest of a batch waits here, not
in the function's queue, nor for descriptors that there are not."""


@dataclass(frozen=True)
class Own(Generic[Pool]):
    """What one process, or one event loop, has for itself."""

    pool: Pool
    calls: Any
    """A semaphore of ABREAST."""
    requests: Any
    """Another one: none waits for calls, which may take hours."""


class Connection(Generic[Pool]):
    """Connections to a platform: ``url`` and ``token``, or those of ``profile`` (its name, or that of another client),
    or those of the environment. Where a profile has several gateways one is asked, and the next one once that takes no
    connection.

    ``timeout``: longest silence in seconds before the gateway counts as gone (default: 60 for streams, and as long as
    a call may last for answers in one piece, whose deadlines are the platform's).
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        profile: str | Profile | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.profile = transport.chosen(url, token, profile)
        self._gateways = Gateways(self.profile.urls)
        self._timeout = timeout
        self._retry = retry or Retry()
        options = transport.options(self.profile, timeout)
        ways = transport.proxies() if options["trust_env"] else {}
        self._anew: Callable[[], Own[Pool]] = lambda: Own(self._pool(options, ways), self._gate(), self._gate())
        try:
            self._made: dict[object, Own[Pool]] = {None: self._anew()}
            """By whose they are; None: nobody has used them."""
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # of SOCKS, of no scheme that is known, no address
            raise InvalidRequest(
                f"the proxy that the environment names (ALL_PROXY, HTTP_PROXY or HTTPS_PROXY) cannot be used: {error}"
            ) from error

    @staticmethod
    @abstractmethod
    def _pool(options: Mapping[str, Any], ways: Mapping[str, str | None]) -> Pool:
        """A client of httpx with ``options``. ``ways``: as ``transport.proxies``; it reads no other."""

    @staticmethod
    @abstractmethod
    def _whose() -> object:
        """Who can use connections that are made now."""

    @staticmethod
    @abstractmethod
    def _lives(owner: Any) -> bool:
        """Whether one that ``_whose`` named can use its connections still."""

    @staticmethod
    def _rests(owner: Any) -> bool:
        """Whether one that lives uses none just now, and might never again."""
        return False

    @staticmethod
    @abstractmethod
    def _gate() -> Any:
        """A semaphore of ABREAST."""

    def _own(self) -> Own[Pool]:
        """Of who asks. Connections of another process (this one was forked), or of another event loop, are left alone:
        whoever shares a connection reads another's answers, and a loop reads for itself alone. Several loops, each in a
        thread of its own, may come here at once."""
        owner = self._whose()
        if owner in self._made:
            return self._made[owner]
        for other, own in self._made.copy().items():
            if own.pool.is_closed:  # and so is this client for all who have not used it yet
                return own
            if other is not None and not self._lives(other):
                self._made.pop(other, None)
        for other in [other for other in self._made if other is not None and self._rests(other)][:-RESTING]:
            self._made.pop(other, None)
        unused = self._made.pop(None, None)
        return self._made.setdefault(owner, unused or self._anew())

    @property
    def _http(self) -> Pool:
        return self._own().pool

    @property
    def url(self) -> str:
        """Of the gateway that is asked."""
        return self._gateways.urls[0]

    def _again_in(self, attempt: int, error: SllmError, *, repeatable: bool) -> float | None:
        """As ``Retry.wait``; what is sent again is sent to the next gateway, whose queue and whose life are others."""
        wait = self._retry.wait(attempt, error, repeatable=repeatable)
        if wait is not None and not isinstance(error.__cause__, httpx.HTTPError):  # it is past who broke off
            self._gateways.past(self.url)
        return wait

    def _whole(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """How a call is sent whose answer comes in one piece."""
        body = transport.encoded(arguments)
        return {"content": body, "headers": transport.JSON, "timeout": transport.whole(self._timeout)}
