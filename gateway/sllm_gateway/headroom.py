"""What runs out while all goes well: room on nodes' disks and in JetStream's streams, the time of certificates. For who
is to be told of it before."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import nats.errors
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from sllm_gateway.metrics import gauge
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.certificates import expires, first_expires
from sllm_runtime.platform.replaced import Stamp, stamps
from sllm_runtime.platform.settings import Settings
from sllm_runtime.protocol.node import Storage
from sllm_runtime.protocol.subjects import GATEWAYS_SEE

LOOK_S: Final = 5.0
"""Between two looks at the streams, however many ask: anybody may."""
WAIT_S: Final = 1.0
"""What JetStream does not answer within this is left out: who asks for metrics wants all the others."""

_OF_NODES: Final[tuple[tuple[str, str, Callable[[Storage], float]], ...]] = (
    ("sllm_node_disk_free_bytes", "Free bytes of the disk that a node's models lie on", lambda said: said.disk_free),
    ("sllm_node_ssd_used_bytes", "Bytes of a node's copies of models from elsewhere", lambda said: said.ssd_used),
    ("sllm_node_ssd_limit_bytes", "Bytes that these may take", lambda said: said.ssd_limit),
)


@dataclass(frozen=True)
class _Stream:
    """Bytes that it holds, and that it may hold (0 or less: any number); its copies that are not up to date."""

    used: int
    limit: int
    behind: int


class Headroom(Collector):
    """Nodes are heard anyway; JetStream is asked by ``look``, before it is collected."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        storage: Callable[[], Mapping[str, Storage]],
        clock: Callable[[], float],
    ) -> None:
        """``storage``: what nodes that report say of theirs."""
        self._bus, self._storage, self._clock = bus, storage, clock
        self._files = {"ca": settings.nats_ca, "own": settings.nats_cert}
        self._stamps: tuple[Stamp, ...] = ()
        self._expire: dict[str, float] = {}
        self._looking = asyncio.Lock()
        self._looked = -math.inf
        self._streams: dict[str, _Stream] = {}

    async def look(self) -> None:
        """At the streams, all at once. Who asks meanwhile waits for the same answers."""
        async with self._looking:
            if self._clock() - self._looked < LOOK_S:
                return
            found = await asyncio.gather(*map(self._ask, GATEWAYS_SEE))
            self._streams = {name: each for name, each in zip(GATEWAYS_SEE, found, strict=True) if each is not None}
            self._looked = self._clock()

    async def _ask(self, stream: str) -> _Stream | None:
        if not self._bus.connected:
            return None
        try:
            async with asyncio.timeout(WAIT_S):
                info = await self._bus.jetstream.stream_info(stream)
        except (nats.errors.Error, TimeoutError):
            return None
        copies = (info.cluster.replicas if info.cluster is not None else None) or ()
        behind = sum(1 for each in copies if each.offline or not each.current)
        return _Stream(info.state.bytes, info.config.max_bytes or 0, behind)

    def collect(self) -> Iterable[Metric]:
        nodes, streams = self._storage(), self._streams
        for name, documentation, of_node in _OF_NODES:
            yield gauge(name, documentation, "node", {node: of_node(each) for node, each in nodes.items()})
        bounded = {name: each.limit for name, each in streams.items() if each.limit > 0}
        behind = {name: each.behind for name, each in streams.items()}
        used = {name: each.used for name, each in streams.items()}
        yield gauge("sllm_stream_bytes", "Bytes that a stream of JetStream holds", "stream", used)
        yield gauge("sllm_stream_limit_bytes", "Bytes that it may hold, where there is a limit", "stream", bounded)
        text = "Its copies on other servers that are away or not up to date"
        yield gauge("sllm_stream_copies_behind", text, "stream", behind)
        yield gauge(
            "sllm_certificate_expiry_timestamp_seconds",
            "When a certificate on the way to NATS expires, in seconds since 1970",
            "certificate",
            self._certificates(),
        )

    def _certificates(self) -> dict[str, float]:
        """Of files the first in each that expires; of the server the one that it has shown."""
        if (now := stamps(*self._files.values())) != self._stamps:
            read = {name: first_expires(file) for name, file in self._files.items() if file is not None}
            self._expire = {name: at for name, at in read.items() if at is not None}
            self._stamps = now
        found, shown = dict(self._expire), self._bus.server_certificate
        if shown is not None:
            with contextlib.suppress(ValueError):
                found["nats"] = expires(shown)
        return found
