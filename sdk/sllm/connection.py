"""What both clients are made of: the profile, the deadlines, the retries, and a pool of connections of either kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import httpx

from sllm import transport
from sllm.gateways import Gateways
from sllm.profiles import Profile
from sllm.retry import Retry
from sllm_runtime.protocol.errors import InvalidRequest, SllmError

Pool = TypeVar("Pool")


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
        wire = {
            "verify": transport.secure(self.profile),
            "proxy": transport.proxy() if options["trust_env"] else None,
        }
        try:
            self._http = self._pool(options, wire)
        except (ImportError, ValueError, httpx.InvalidURL) as error:  # of SOCKS, of no scheme that is known, no address
            raise InvalidRequest(
                f"the proxy that the environment names (ALL_PROXY, HTTP_PROXY or HTTPS_PROXY) cannot be used: {error}"
            ) from error

    @staticmethod
    @abstractmethod
    def _pool(options: Mapping[str, Any], wire: Mapping[str, Any]) -> Pool:
        """A client of httpx with ``options``, all of whose connections are made with ``wire``."""

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
