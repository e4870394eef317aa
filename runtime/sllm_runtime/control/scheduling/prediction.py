"""What a start is expected to take, part by part. Kept with the instance, beside what it took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec

from sllm_runtime.protocol.loader import is_link
from sllm_runtime.protocol.node import NodeStatus
from sllm_runtime.protocol.records import ModelRecord
from sllm_runtime.protocol.timeline import IMPORT, SANDBOX, SETUP, Span

Tier: TypeAlias = Literal["none", "dram", "ssd", "remote"]
"""Where the weights are nearest; ``none``: the function has none."""


def arrival(queue: float, lead: float, read: float) -> float:
    """Seconds until weights are there that wait for ``queue``, then come in ``read``; ``lead`` as in ``Estimate``."""
    return max(queue, lead) + read + min(lead, 0.0)


def reading(model: ModelRecord, bandwidth: float, link: float = 0.0) -> float:
    """n/b in seconds by a path of so many bytes per second; 0: what is in memory is not read. Chunks go on to an
    accelerator by its ``link`` (0: there is none, or none was used) as they come: the slower way counts."""
    read = model.nbytes / bandwidth if bandwidth else 0.0
    return max(read, model.largest / link) if link else read


def slowest_link(status: NodeStatus) -> float:
    """Bytes per second from a node's memory to an accelerator, of the slowest that was used; 0: none was. Nothing waits
    there: who starts has its accelerators for itself."""
    used = (path.bandwidth for path in status.paths if path.bandwidth and is_link(path.path))
    return min(used, default=0.0)


class Estimate(msgspec.Struct, frozen=True):
    """Seconds of a start's parts. The weights come while the sandbox is made and the function imported."""

    # A structure, since a decision makes several: a frozen dataclass takes five times as long.

    tier: Tier
    warm: bool
    """Whether a sandbox was waiting in the node's pool, which no start sent before would take."""
    sandbox: float
    imports: float
    queue: float
    """q: what is being served before it on the same path."""
    read: float
    """n/b by the slowest path on the way: n of all partitions where they share it, of the largest one on links."""
    setup: float
    release: float = 0.0
    """Until what is in the way has gone, moved away or ended."""
    coming: float = 0.0
    """q of starts before it whose weights have yet to be asked for."""
    lead: float = 0.0
    """Until the weights are asked for; below zero: they come in so much less than n/b. What is being served is served
    meanwhile; those that come have as long to go."""
    rest: float = 0.0
    """What earlier starts took beyond these: reports on their way, mapping of what is in memory."""

    @property
    def seconds(self) -> float:
        """From the decision to READY."""
        there = arrival(self.queue, self.lead, self.coming + self.read)
        return self.release + max(self.sandbox + self.imports, there) + self.setup + self.rest

    def after(self, release: float) -> Estimate:
        """The same where there is room after ``release`` seconds."""
        return msgspec.structs.replace(self, release=release)

    def terms(self) -> dict[str, float]:
        """Its terms in seconds, those that a span tells of by the name of that."""
        return {
            "release": self.release,
            SANDBOX: self.sandbox,
            IMPORT: self.imports,
            "lead": self.lead,
            "queue": self.queue + self.coming,
            "read": self.read,
            SETUP: self.setup,
            "rest": self.rest,
        }

    def measured(self, spans: tuple[Span, ...]) -> Estimate:
        """With what its parts took where ``spans`` say so. Queueing and reading stay as they were expected: what the
        weights took in fact is seen in the whole."""
        took = {span.name: span.ms / 1000.0 for span in spans}
        return msgspec.structs.replace(
            self,
            sandbox=took.get(SANDBOX, self.sandbox),
            imports=took.get(IMPORT, self.imports),
            setup=took.get(SETUP, self.setup),
        )

    def words(self) -> str:
        """For people: ``1.24 s (ssd: queue 0.20 + read 0.90; sandbox 0.02, import 0.10, setup 0.04)``."""
        lead = f"lead {self.lead:.2f}, " if self.lead else ""
        queue = self.queue + self.coming
        weights = f"{self.tier}: {lead}queue {queue:.2f} + read {self.read:.2f}; " if self.tier != "none" else ""
        rest = f"sandbox {self.sandbox:.2f}, import {self.imports:.2f}, setup {self.setup:.2f}"
        rest += f", rest {self.rest:.2f}" if self.rest else ""
        after = f"; after {self.release:.2f} until there is room" if self.release else ""
        return f"{self.seconds:.2f} s ({weights}{rest}{after})"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What was expected when a start was not made at once: ``what`` (wait, evict, migrate) was decided ``at`` that
    time, for an instance that would be ready ``seconds`` later (None: by a policy that does not ask)."""

    what: str
    at: float
    seconds: float | None
    why: str = ""
    """The decision's words."""
    instances: tuple[str, ...] = ()
    """Whose places it takes, where the words do not name them."""
