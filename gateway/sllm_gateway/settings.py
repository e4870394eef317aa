"""What the gateway reads from its environment (``SLLM_*``)."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import Field

from sllm_runtime.platform.control_groups import memory
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.calls import RESUME_WINDOW_S
from sllm_runtime.protocol.errors import InvalidRequest
from sllm_runtime.protocol.subjects import TOKEN


class GatewaySettings(Settings):
    """Times are seconds, sizes bytes."""

    gateway: str = Field(default="g1", pattern=TOKEN)
    """Its id: one subject token, unique among the gateways of a cluster."""
    host: str = "127.0.0.1"
    port: int = Field(default=8080, ge=0, le=65535)
    """0: any free port."""
    metrics_port: int | None = Field(default=None, ge=1, le=65535)
    """Where ``/livez``, ``/readyz`` and ``/metrics`` are answered too, also while it drains; None: nowhere else."""
    token_file: Path | None = None
    """Holds the bearer token, or several, one a line, while one is replaced; without one only loopback is served."""
    max_body: int = Field(default=limits.MAX_BODY, gt=0)
    bodies: int = Field(default=0, ge=0)
    """What the bodies of all calls that are being answered may take together. 0: see ``all_bodies``."""
    head_timeout: float = Field(default=limits.HEAD_TIMEOUT_S, gt=0)
    """Once to twice as long may a request's line and headers take."""
    body_timeout: float = Field(default=limits.BODY_TIMEOUT_S, gt=0)
    """From a request's headers to the end of its body."""
    keep_alive: int = Field(default=75, ge=1)
    """A connection without a request is closed after this. Behind a proxy: more than the proxy keeps one, which may
    otherwise send a request into a connection that is being closed, and tell its client of a bad gateway."""
    max_output: int = Field(default=limits.MAX_BODY, gt=0)
    """Largest answer that is not streamed."""
    outputs: int = Field(default=0, ge=0)
    """What all of these that are collected may take together. 0: see ``all_outputs``."""
    max_bundle: int = Field(default=limits.MAX_BUNDLE, gt=0, le=limits.MAX_BUNDLE)
    """SDK, controller and workers take none that is larger than the default."""
    window: int = Field(default=limits.WINDOW, ge=2 * limits.MAX_PART)
    """Bytes buffered for one call's reader, as credit counts them; then the call is paused."""
    slow_consumer: float = Field(default=limits.SLOW_CONSUMER_S, gt=0)
    headers_wait: float = Field(default=limits.HEADERS_WAIT_S, gt=0)
    heartbeat: float = Field(default=limits.SSE_HEARTBEAT_S, gt=0, le=30)
    """Clients take a stream that is silent for 60 s for broken, as most proxies do."""
    drain: float = Field(default=5.0, ge=0)
    """Running calls have this long when the gateway is asked to stop."""
    resume_window: float = Field(default=RESUME_WINDOW_S, gt=0)
    """A call with an ``Idempotency-Key`` goes on for so long without a reader."""
    backlog: int = Field(default=2048, gt=0)
    gateways: int = Field(default=1, ge=1)
    """How many gateways share this machine's memory; ``sllm up`` says so."""

    def all_bodies(self) -> int:
        """``bodies``, or this one's part of a quarter of the memory and four of the largest at least; the largest has
        room in any case."""
        return max(self.bodies or max(self._quarter, 4 * self.max_body), self.max_body)

    def all_outputs(self) -> int:
        """``outputs``, or this one's part of a quarter of the memory and four of the largest at least; the largest has
        room anyway, also in as many frames as may be: their cost is twice its bytes (``delivery.FRAME_BYTES``)."""
        return max(self.outputs or max(self._quarter, 4 * self.max_output), 3 * self.max_output)

    @property
    def _quarter(self) -> int:
        return memory() // 4 // self.gateways

    def token(self) -> str | None:
        """The bearer tokens, one a line. Raises ``InvalidRequest`` for a file that has none, or a public address
        without one."""
        if self.token_file is not None:
            try:
                text = self.token_file.read_text().strip()
            except OSError as error:
                raise InvalidRequest(f"SLLM_TOKEN_FILE: cannot read {self.token_file}: {error}") from error
            if not text:
                raise InvalidRequest(f"SLLM_TOKEN_FILE: {self.token_file} is empty; put one line with a token into it")
            return text
        if not _loopback(self.host):
            raise InvalidRequest(
                f"SLLM_HOST={self.host} is no loopback address and there is no token: anybody could run code here; "
                "set SLLM_TOKEN_FILE, or SLLM_HOST=127.0.0.1"
            )
        return None


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
