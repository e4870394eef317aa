"""What both clients are made of: the profile, the deadlines, the retries, and a pool of connections of either kind."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from sllm import transport
from sllm.retry import Retry

Pool = TypeVar("Pool")


class Connection(Generic[Pool]):
    """Connections to one gateway: ``url`` and ``token``, or those of ``profile``, or those of the environment.

    ``timeout``: longest silence in seconds before the gateway counts as gone (default: 60 for streams, and as long as
    a call may last for answers in one piece, whose deadlines are the platform's).
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        profile: str | None = None,
        timeout: float | None = None,
        retry: Retry | None = None,
    ) -> None:
        self.profile = transport.chosen(url, token, profile)
        self._timeout = timeout
        self._retry = retry or Retry()
        wire = {"socket_options": transport.keepalive(), "verify": transport.secure(self.profile)}
        self._http = self._pool(transport.options(self.profile, timeout), wire)

    @staticmethod
    @abstractmethod
    def _pool(options: Mapping[str, Any], wire: Mapping[str, Any]) -> Pool:
        """A client of httpx with ``options``, all of whose connections are made with ``wire``."""

    @property
    def url(self) -> str:
        """The gateway's."""
        return self.profile.url

    def _whole(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """How a call is sent whose answer comes in one piece."""
        body = transport.encoded(arguments)
        return {"content": body, "headers": transport.JSON, "timeout": transport.whole(self._timeout)}
