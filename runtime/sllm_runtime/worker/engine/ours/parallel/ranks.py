"""Rank 0's runner, and the process that is another rank.

Every rank makes the same batch and runs the same layers at the same time, each with its part of the weights and of KV.
Rank 0 alone knows requests; the others learn tokens, positions and pages of each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Many

import msgspec
import torch

from sllm_runtime.protocol.errors import InstanceLost, ProtocolError, SllmError, StartFailed
from sllm_runtime.protocol.limits import PROTOCOL_VERSION
from sllm_runtime.protocol.stages import LayerRange, OnEdge, RankHello, Step
from sllm_runtime.worker.engine.ours.batch import Batch
from sllm_runtime.worker.engine.ours.driver import CAUSE_S, Driver
from sllm_runtime.worker.engine.ours.edge import Edges
from sllm_runtime.worker.engine.ours.follower import Follower, check_version, level
from sllm_runtime.worker.engine.ours.model.decoder import Decoder
from sllm_runtime.worker.engine.ours.numerics import Numerics
from sllm_runtime.worker.engine.ours.parallel.group import Group
from sllm_runtime.worker.engine.ours.scheduler import Limits


class Ranks(Driver):
    """Rank 0 of ``group``; ``links`` lead to ranks 1, 2, …. Owns them all.

    ``fingerprint``: of the numerics, which every rank must have alike; with the proof of a self-test that all ranks
    made together, the engine is exact. Raises ``InstanceLost`` if a rank does not answer, or what it refuses it for.
    """

    tokens = True

    def __init__(
        self, decoder: Decoder, numerics: Numerics, group: Group, links: Many[Edges], *, kv_bytes: int,
        fingerprint: str,
    ) -> None:  # fmt: skip
        super().__init__(decoder, LayerRange(0, decoder.count), numerics, depth=1)
        limits = Limits()
        self._group = group
        self._links = links
        self._logits: torch.Tensor | None = None
        hello = RankHello(
            fingerprint=fingerprint,
            level=numerics.name,
            rank=0,
            ranks=group.size,
            rows=numerics.padded(limits.prefill + limits.running),
            pages=kv_bytes // self._shape.page_bytes,
        )
        with self._failing():
            if len(links) != group.size - 1:
                raise ProtocolError(f"{len(links)} streams lead to the other ranks of {group.size}")
            answers = [self._greet(msgspec.structs.replace(hello, rank=rank), rank) for rank in range(1, group.size)]
            self._settle(min(answer.pages for answer in (hello, *answers)))

    def _greet(self, hello: RankHello, rank: int) -> RankHello:
        link = self._links[rank - 1]
        link.before = link.behind = f"rank {rank}"
        link.send(hello)
        answer = link.receive(link.patience_s)
        if not isinstance(answer, RankHello) or answer.rank != rank:
            raise ProtocolError(f"rank {rank} answered with {type(answer).__name__}, or is another rank")
        check_version(answer.version, link.before)
        return answer

    def _tell(self, message: OnEdge) -> None:
        for link in self._links:
            link.send(message)

    def _run(self, number: int, batch: Batch) -> None:
        with self._decoder.backend.current():
            hidden = self._decoder.run(self._decoder.begin(batch), batch, 0, self._decoder.count)
            self._logits = self._decoder.logits(hidden, batch.wanted) if len(batch.wanted) else None

    def _collect(self) -> torch.Tensor | None:
        logits, self._logits = self._logits, None
        return None if logits is None else logits.cpu()  # waits for a GPU

    def _cause(self, error: InstanceLost) -> SllmError:
        self._group.close()
        return told(self._links, error)

    def _release(self) -> None:
        self._group.close()
        for link in self._links:
            link.close()


def told(links: Many[Edges], error: InstanceLost) -> SllmError:
    """What the ranks on ``links`` say of ``error``. The rank that ends without a word is the one that is gone; what
    another says of it is of no use."""
    causes: list[SllmError] = []
    for link in links:
        try:
            while True:
                link.receive(min(CAUSE_S, link.patience_s))
        except SllmError as cause:
            causes.append(cause)
            if not link.told or not isinstance(cause, InstanceLost):
                return cause
    return causes[0] if causes else error


class Rank(Follower):
    """All layers of ``decoder``, of which this rank has a part. Owns ``edges`` (see ``Edges.duplex``) and ``group``."""

    def __init__(self, decoder: Decoder, group: Group, edges: Edges, *, kv_bytes: int, fingerprint: str) -> None:
        super().__init__(decoder, LayerRange(0, decoder.count), edges, kv_bytes)
        self._group = group
        self._fingerprint = fingerprint

    def run(self) -> SllmError:
        """See ``Follower.run``."""
        with contextlib.closing(self._group):
            return super().run()

    def _open(self) -> tuple[Numerics, int]:
        self._edges.before = self._edges.behind = "rank 0"
        hello = self._edges.receive(self._edges.patience_s)
        if not isinstance(hello, RankHello):
            raise ProtocolError(f"rank 0 began with {type(hello).__name__}, not RankHello")
        check_version(hello.version, "rank 0")
        mine = (self._group.rank, self._group.size)
        if (hello.rank, hello.ranks) != mine:
            raise ProtocolError(f"rank {hello.rank} of {hello.ranks} is meant, this is rank {mine[0]} of {mine[1]}")
        if hello.fingerprint != self._fingerprint:
            raise StartFailed(
                f"rank {hello.rank} would compute other bits than rank 0: libraries, processor, threads or weights "
                "differ; place the ranks on nodes that are alike"
            )
        made = level(hello.level)
        self._edges.send(msgspec.structs.replace(hello, version=PROTOCOL_VERSION, pages=self._room))
        return made, hello.rows

    def _pass_on(self, message: OnEdge) -> None:
        """Nobody is behind."""

    def _run(self, step: Step, batch: Batch) -> None:
        if any(len(part.tokens) != part.count for part in step.parts):
            raise ProtocolError(f"step {step.number} has not as many tokens as positions")
        with self._decoder.backend.current():
            hidden = self._decoder.run(self._decoder.begin(batch), batch, 0, self._decoder.count)
            if len(batch.wanted):
                self._decoder.logits(hidden, batch.wanted)
