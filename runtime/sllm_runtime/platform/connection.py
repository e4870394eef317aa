"""Opening a NATS connection: identity, TLS, and one clear error when it, or its JetStream, is not to be had."""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import nats.errors
import nats.js.errors
from nats.aio.client import Client

from sllm_runtime.platform.direct import DirectClient
from sllm_runtime.platform.owned import end
from sllm_runtime.platform.replaced import Stamp, stamps
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol import nats_versions, subjects
from sllm_runtime.protocol.errors import InvalidRequest, SllmError, Unauthorized, Unavailable
from sllm_runtime.protocol.limits import MAX_MESSAGE, MIB

log = logging.getLogger(__name__)

_FLUSH_S = 10.0
PENDING_BYTES = 8 * MIB
"""What may wait for the server before a publisher waits."""
_PING_S = 5
CONNECT_S = 1.0
"""For one try at one server; nothing depends on the first one, since it is tried again."""
ELECTION_S = 15.0
"""Servers of a cluster that have just met, or lost one, answer nothing about JetStream until they have a leader."""
_AGAIN_S = 0.2
_NO_LEADER = 10008
"""JetStream's code for a cluster that knows it has none."""
_REFUSED = ("authorization", "authentication", "unauthorized", "credentials")


async def open_connection(
    client: DirectClient,
    settings: Settings,
    identity: str,
    options: dict[str, Any],
    *,
    name: str,
    on_error: Callable[[Exception], Awaitable[None]],
    on_disconnect: Callable[[], Awaitable[None]],
    on_reconnect: Callable[[], Awaitable[None]],
    on_closed: Callable[[], Awaitable[None]],
    jetstream: bool = True,
) -> None:
    """Connect ``client`` by ``options`` and (``jetstream``) make sure that JetStream answers. Raises ``Unavailable`` or
    ``Unauthorized``."""
    troubles = _Troubles(client, settings, identity, on_error)
    options = {
        **options,
        "name": name,
        "error_cb": troubles.happened,
        "disconnected_cb": on_disconnect,
        "reconnected_cb": on_reconnect,
        "closed_cb": on_closed,
    }
    client.renewed = Certificates(settings).renewed
    await _connect(client, settings, options, troubles)
    # Not refused: a platform that runs on it would not come up again after an upgrade.
    if problem := nats_versions.problem(version := client.connected_server_version):
        log.error("%s at %s: %s; %s", version, settings.nats_url, problem, nats_versions.REMEDY)
    if client.max_payload < MAX_MESSAGE + 4096:
        raise Unavailable(
            f"NATS at {settings.nats_url} takes messages of {client.max_payload} bytes only; set its max_payload to 1MB"
        )
    if jetstream:
        await _require_jetstream(client, settings, identity)


class _Troubles:
    """What goes wrong on a connection. Until it stands, a refusal for good is noticed: nats-py would go on trying."""

    def __init__(
        self, client: Client, settings: Settings, identity: str, tell: Callable[[Exception], Awaitable[None]]
    ) -> None:
        self.refused: asyncio.Future[SllmError] = asyncio.get_running_loop().create_future()
        self.last = "no answer"
        self._client = client
        self._settings = settings
        self._identity = identity
        self._tell = tell

    async def happened(self, error: Exception) -> None:
        self.last = str(error) or type(error).__name__
        if is_refusal(error) and not self.refused.done() and not self._client.is_connected:
            self.refused.set_result(_refusal(self._settings, self._identity, self.last))
        await self._tell(error)


def is_refusal(error: Exception) -> bool:
    """Whether it says that keys or certificates do not fit, which no further try changes by itself."""
    return isinstance(error, ssl.SSLError) or any(word in str(error).lower() for word in _REFUSED)


async def _connect(client: Client, settings: Settings, options: dict[str, Any], troubles: _Troubles) -> None:
    """Until it stands or is refused, at most ``nats_timeout``."""
    connecting: asyncio.Task[Any] = asyncio.create_task(client.connect(**options), name="connect")
    waited: set[asyncio.Future[Any]] = {connecting, troubles.refused}
    try:
        await asyncio.wait(waited, timeout=settings.nats_timeout, return_when=asyncio.FIRST_COMPLETED)
        if troubles.refused.done():
            raise troubles.refused.result()
        if not connecting.done():
            raise Unavailable(
                f"no NATS server at {settings.nats_url} ({troubles.last}); check SLLM_NATS_URL and that it runs"
            )
        _raise_if_failed(connecting, settings)
    finally:
        # It may swallow its cancellation (Python 3.11: a try that fails as it is cancelled), and would try for ever.
        await end([connecting])
        if not connecting.cancelled():
            connecting.exception()  # it was heard: by who is told below, or of no use any more


def _raise_if_failed(connecting: asyncio.Future[Any], settings: Settings) -> None:
    error = connecting.exception()
    if error is not None:
        raise Unavailable(f"no connection to NATS at {settings.nats_url}: {error}") from error


def _refusal(settings: Settings, identity: str, text: str) -> SllmError:
    return Unauthorized(
        f"NATS at {settings.nats_url} refuses {identity}: {text}; check SLLM_NATS_CREDS, certificates or the identity"
    )


def connection_options(settings: Settings, identity: str, kind: str) -> dict[str, Any]:
    """nats-py's options for this identity of this ``kind`` (empty: by its identity file, and without one it is as a
    node). Raises ``InvalidRequest`` for settings that cannot work."""
    if not settings.nats_url:
        raise InvalidRequest("SLLM_NATS_URL is not set; start the platform with `sllm up` or name a NATS server")
    who = settings.identity()
    if who is not None and who.identity != identity:
        raise InvalidRequest(f"SLLM_IDENTITY_FILE is for {who.identity}, this is {identity}")
    kind = (who.kind if who is not None else "") or kind or subjects.NODE
    options: dict[str, Any] = {
        "servers": _servers(settings.nats_url),
        "inbox_prefix": subjects.inbox(kind, identity),
        "max_reconnect_attempts": -1,
        # Spread, so that a restarted server does not meet all of them in the same millisecond.
        "reconnect_time_wait": random.uniform(0.05, 0.25),
        "pending_size": PENDING_BYTES,
        "flush_timeout": _FLUSH_S,
        "ping_interval": _PING_S,
        "connect_timeout": CONNECT_S,
    }
    if who is not None and who.user is not None:
        options |= {"user": who.user, "password": who.password}
    if settings.nats_creds is not None:
        options["user_credentials"] = str(settings.nats_creds)
    context = tls_context(settings)
    return options | ({"tls": context} if context else {})


def _servers(said: str) -> list[str]:
    """Raises ``InvalidRequest`` for what names no server."""
    urls = [url.strip() for url in said.split(",") if url.strip()]
    for url in urls:
        try:
            parts = urlsplit(url if "://" in url else f"nats://{url}")
            names_one = bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none
            names_one = False
        if not names_one:
            text = f"SLLM_NATS_URL: {url!r} is no NATS server; write nats://host:port"
            raise InvalidRequest(text, field="SLLM_NATS_URL")
    if not urls:
        raise InvalidRequest("SLLM_NATS_URL names no NATS server; write nats://host:port", field="SLLM_NATS_URL")
    return urls


def tls_context(settings: Settings) -> ssl.SSLContext | None:
    """The TLS settings, if any file or a ``tls://`` URL asks for them. Raises ``InvalidRequest`` for bad files."""
    wanted = settings.nats_ca or settings.nats_cert or "tls://" in (settings.nats_url or "")
    if not wanted:
        return None
    try:
        context = ssl.create_default_context(cafile=str(settings.nats_ca) if settings.nats_ca else None)
        if settings.nats_cert is not None:
            context.load_cert_chain(settings.nats_cert, settings.nats_key)
    except OSError as error:
        raise InvalidRequest(f"SLLM_NATS_CA, SLLM_NATS_CERT, SLLM_NATS_KEY: {error}") from error
    return context


class Certificates:
    """TLS by its files, which are renewed in place while daemons run: read again before a connection is made."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._seen = self._stamps()

    def renewed(self) -> ssl.SSLContext | None:
        """Anew, where a file is another one than before. Raises as ``tls_context``: then they are looked at again."""
        if (now := self._stamps()) == self._seen:
            return None
        context = tls_context(self._settings)
        self._seen = now
        return context

    def _stamps(self) -> tuple[Stamp, ...]:
        return stamps(self._settings.nats_ca, self._settings.nats_cert, self._settings.nats_key)


async def _require_jetstream(client: Client, settings: Settings, identity: str) -> None:
    """That it answers, at the latest when a cluster has had the time to elect a leader."""
    deadline = asyncio.get_running_loop().time() + ELECTION_S
    while True:
        try:
            await client.jetstream().account_info()
            return
        except nats.errors.Error as error:
            if not _electing(error) or asyncio.get_running_loop().time() >= deadline:
                raise _no_jetstream(settings, identity, error) from error
        await asyncio.sleep(_AGAIN_S)  # nothing tells that there is a leader


def _electing(error: nats.errors.Error) -> bool:
    """Whether it may be different soon."""
    return isinstance(error, nats.errors.TimeoutError) or (
        isinstance(error, nats.js.errors.APIError) and error.err_code == _NO_LEADER
    )


def _no_jetstream(settings: Settings, identity: str, error: nats.errors.Error) -> Unavailable:
    if isinstance(error, nats.js.errors.Error) and not _electing(error):
        return Unavailable(
            f"NATS at {settings.nats_url} has no JetStream for {identity} ({_why(error)}); start it with `-js` or"
            " allow JetStream for this account"
        )
    return Unavailable(
        f"JetStream at {settings.nats_url} does not answer {identity} within {ELECTION_S:g} s ({_why(error)}); check"
        " that most of its servers run, and its permissions for $JS.API.INFO and for its own inbox"
    )


def _why(error: Exception) -> str:
    return str(error) or type(error).__name__
