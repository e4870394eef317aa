"""Models brought to this node's disk for no load: what a placement or a person wants there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from sllm_loaderd.daemon.registration import Report
from sllm_loaderd.opening import finished, opened
from sllm_loaderd.reader import close_all
from sllm_loaderd.ssd.fill import Fill
from sllm_loaderd.ssd.write import CopyWrite
from sllm_loaderd.store import StoredModel
from sllm_loaderd.write_back import WriteBack
from sllm_runtime.protocol.checkpoint import partition_name
from sllm_runtime.protocol.errors import Conflict, InvalidCheckpoint, Unavailable
from sllm_runtime.protocol.quantities import show_bytes

if TYPE_CHECKING:
    from sllm_loaderd.daemon.service import LoaderService

STAGE: Final = "copy"
_AGAIN_S: Final = 0.5
"""Who is told this of a conflict may ask again; a source that has changed stays as it is."""


class Copying:
    """Copies to the SSD tier that nobody loads. ``running``: models that must not be deleted meanwhile."""

    def __init__(self, service: LoaderService) -> None:
        self._service = service
        self.running: set[str] = set()

    async def copy(self, digest: str, report: Report) -> None:
        """Every partition of a model is on this node's disk when this returns: in the store, or on the SSD tier.

        Raises ``Conflict`` while it is being copied already, ``Unavailable`` where the tier has no room for it, and
        what its sources raise.
        """
        if digest in self.running:
            text = f"model {digest} is being copied to the SSD tier already; ask again"
            raise Conflict(text, field="model", retry_after_s=_AGAIN_S)
        self.running.add(digest)
        try:
            model = await self._service.model(digest)
            ranks = range(len(model.index.partitions))
            lacking = [rank for rank in ranks if not self._there(model, rank)]
            total = sum(model.index.partitions[rank].nbytes for rank in lacking)
            done = 0

            def written(nbytes: int) -> None:
                nonlocal done
                done += nbytes
                report(STAGE, done, total)

            report(STAGE, 0, total)
            for rank in lacking:
                await self._fill(model, rank, written)
        finally:
            self.running.discard(digest)

    def _there(self, model: StoredModel, rank: int) -> bool:
        if model.index.partitions[rank].nbytes == 0:
            return True
        whole = model.checkpoint.directory / partition_name(rank)
        return whole.exists() or self._service.store.ssd.holds(model.checkpoint.digest, rank)

    async def _fill(self, model: StoredModel, rank: int, written: Callable[[int], None]) -> None:
        service, ssd, digest = self._service, self._service.store.ssd, model.checkpoint.digest
        own = service.pool.chunk_bytes
        if model.index.chunk_bytes != own:
            raise InvalidCheckpoint(
                f"{digest} has chunks of {model.index.chunk_bytes} bytes, this node's pool of {own}",
                field="chunk_bytes",
            )
        sources = await opened(lambda: service.settings.pipeline.open_sources(model, rank), close_all)
        try:
            if (half := service.residency.given_up(digest, rank)) is not None:
                await finished(half.stop)  # which removes a file as large as the partition
            write = await opened(lambda: ssd.begin(model, rank, wanted=True), _abandon)
            if write is None and ssd.lacks_room(model, rank) and (halves := service.residency.all_given_up()):
                await finished(partial(_stop, halves))  # of other models
                write = await opened(lambda: ssd.begin(model, rank, wanted=True), _abandon)
            if write is None:
                self._refused(model, rank)
                return
            fill = Fill(
                model, rank, write, sources, service.paths, integrity=service.settings.pipeline.integrity,
                written=written,
            )  # fmt: skip
            await fill.run(service.pool, service.residency)
        finally:
            close_all(sources)

    def _refused(self, model: StoredModel, rank: int) -> None:
        """Raises why no copy was begun, unless there is one."""
        ssd, digest = self._service.store.ssd, model.checkpoint.digest
        if ssd.holds(digest, rank):
            return
        if ssd.making(digest, rank):
            text = f"partition {rank} of {digest} is being copied beside a load; ask again"
            raise Conflict(text, field="model", retry_after_s=_AGAIN_S)
        used, limit = ssd.status()
        raise Unavailable(
            f"the SSD tier has no room for {show_bytes(model.index.partitions[rank].nbytes)} of {digest[:19]}:"
            f" {show_bytes(used)} of {show_bytes(limit)} are in use; raise --ssd-bytes, or delete models there"
        )


def _stop(halves: list[WriteBack]) -> None:
    for half in halves:
        half.stop()


def _abandon(write: CopyWrite | None) -> None:
    if write is not None:
        write.abandon()
