"""What is known of the nodes that a provider makes: one immutable value in the view. Times are the controller's
monotonic seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec

from sllm_runtime.control.providing.provider import Offer, Shape
from sllm_runtime.protocol.events import Kind
from sllm_runtime.protocol.node import Gpu
from sllm_runtime.protocol.records import PoolRecord

_NOTHING: Final[Mapping[Any, Any]] = {}
NEWEST: Final = 0.3
"""Weight of the newest boot in the moving mean."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Time limits of a pool of nodes, in seconds."""

    idle: float = 600.0
    """A node that has had nothing to do for so long goes."""
    cooldown: float = 60.0
    """Between two decisions."""
    boot: float = 180.0
    """From the decision to the node's first report, until one has shown it."""
    lost: float = 900.0
    """A node that has not been heard for so long is given back: another one takes its place."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A node that was asked for and has not come. ``known``: it is known since when, so that its boot can be learnt."""

    at: float
    known: bool


@dataclass(frozen=True, slots=True)
class Errand:
    """Work on a node that is no instance: a model that is prepared. ``node`` empty: it waits for one."""

    node: str
    cpu: float = 0.0
    memory: int = 0
    gpus: tuple[tuple[str, int], ...] = ()
    gpu_memory: int = 0


@dataclass(frozen=True, slots=True)
class News:
    """Something to tell as an event."""

    kind: Kind
    message: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class Pool:
    """The nodes of a provider. ``record`` is stored; the rest a new controller finds again or learns anew."""

    timing: Timing = field(default_factory=Timing)
    record: PoolRecord = field(default_factory=PoolRecord)
    offer: Offer | None = None
    """None: the provider has not answered yet."""
    arrived: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    """Members that have reported, and when they did first."""
    coming: tuple[Asked, ...] = ()
    """The oldest first."""
    silent: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    """Members that are not heard, and since when."""
    idle: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    """Members with nothing to do, and since when."""
    removed: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    """When the provider was last told to remove them."""
    acted: float | None = None
    errands: Mapping[str, Errand] = field(default_factory=lambda: _NOTHING)
    news: tuple[News, ...] = ()
    """Of the last decision."""

    @property
    def boot_s(self) -> float:
        """What a node is expected to take from the decision to its first report."""
        return self.record.boot_s or self.timing.boot

    @property
    def shape(self) -> Shape | None:
        """What a node has, as nodes of it were seen to have it."""
        if self.offer is None:
            return None
        shape, seen = self.offer.shape, self.record
        last = self.full and not self.coming  # no other one comes that could tell whether the last was broken
        gpus = seen.fewer if seen.gpus is None and last else seen.gpus
        return replace(
            shape,
            cpu=min(shape.cpu, seen.cpu) if seen.cpu else shape.cpu,
            memory=min(shape.memory, seen.memory) if seen.memory else shape.memory,
            gpus=shape.gpus
            if gpus is None
            else tuple(Gpu(index=index, kind=kind, memory=memory) for index, (kind, memory) in enumerate(gpus)),
        )

    @property
    def full(self) -> bool:
        """Whether no more may be asked for."""
        return self.offer is not None and self.offer.desired >= self.offer.most

    def left_s(self, now: float) -> float:
        """Until the next node, of those asked for or of one that is asked for next; 0 if it should be there."""
        since = self.coming[0].at if self.coming else now
        return max(self.boot_s - (now - since), 0.0)

    def cooled(self, now: float) -> bool:
        return self.acted is None or now - self.acted >= self.timing.cooldown

    def came(self, now: float) -> Pool:
        """With one node more that has reported for the first time."""
        if not self.coming:
            return self
        asked, rest = self.coming[0], self.coming[1:]
        if not asked.known:
            return replace(self, coming=rest)
        took = now - asked.at
        mean = self.record.boot_s + NEWEST * (took - self.record.boot_s) if self.record.boot_s else took
        return replace(self, coming=rest, record=_with(self.record, boot_s=mean))

    def with_record(self, **fields: Any) -> Pool:
        """With these fields of the stored record; itself if they are the same."""
        made = _with(self.record, **fields)
        return self if made == self.record else replace(self, record=made)


def _with(record: PoolRecord, **fields: Any) -> PoolRecord:
    return msgspec.structs.replace(record, **fields)
