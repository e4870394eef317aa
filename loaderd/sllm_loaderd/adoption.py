"""Chunks that outlived the loaderd which filled them: looked at, counted, and trusted when their digest is right."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from sllm_loaderd.chunk import Chunk
from sllm_loaderd.files import chunk_digest
from sllm_loaderd.opening import finished
from sllm_loaderd.pool import ChunkPool
from sllm_loaderd.residency import Residency
from sllm_loaderd.store import StoredModel
from sllm_runtime.protocol.errors import Conflict
from sllm_runtime.protocol.loader import Adopt, Adopted

log = logging.getLogger(__name__)


async def adopt(
    request: Adopt, fds: Sequence[int], model: StoredModel | None, pool: ChunkPool, residency: Residency
) -> Adopted:
    """Take in what ``request`` brings; ``fds`` stay the caller's. ``model``: None if the node has it no more.

    Everything with the size and the seals of a chunk counts from here on for as long as its holders live. What has the
    digest that the index states serves loads again.
    """
    taken, known = _take(request, fds, pool)
    chunks = [chunk for _, chunk in (*taken, *known)]
    for holder in request.holders:
        residency.hold(chunks, holder)
    try:
        good = await _checked(taken, request.partition, model) if model is not None else {}
    except asyncio.CancelledError:
        pool.free([chunk for _, chunk in taken])
        raise
    refused = [chunk for number, chunk in taken if good.get(number) is not chunk]
    if model is not None and good:
        refused += residency.adopt(model, request.partition, good)
    pool.free(refused)
    if refused:
        log.warning("%d of %d kept chunks of %s are not used", len(refused), len(fds), request.model)
    spent = {chunk.id for chunk in refused}
    return Adopted(
        request=request.request,
        ids=tuple(chunk.id for chunk in chunks if chunk.id not in spent),
        counted=tuple(chunk.id for chunk in refused if chunk.holders),
    )


Numbered = list[tuple[int, Chunk]]


def _take(request: Adopt, fds: Sequence[int], pool: ChunkPool) -> tuple[Numbered, Numbered]:
    """Chunks new to the pool, and those it has already (the connection was lost, not the daemon)."""
    taken: Numbered = []
    known: Numbered = []
    if request.chunk_bytes != pool.chunk_bytes:
        log.warning("kept chunks of %d bytes cannot be used in a pool of %d", request.chunk_bytes, pool.chunk_bytes)
        return taken, known
    for number, fd in zip(request.numbers, fds, strict=False):
        try:
            chunk, new = pool.adopt(fd)
        except (Conflict, OSError) as error:
            log.warning("chunk %d of %s is not adopted: %s", number, request.model, error)
        else:
            (taken if new else known).append((number, chunk))
    return taken, known


async def _checked(chunks: Numbered, partition: int, model: StoredModel) -> dict[int, Chunk]:
    """Those whose bytes are what the index says. Cancelled, it ends only when nobody reads them any more."""
    return await finished(lambda: _matching(chunks, partition, model))


def _matching(chunks: Numbered, partition: int, model: StoredModel) -> dict[int, Chunk]:
    index = model.index
    good: dict[int, Chunk] = {}
    if not 0 <= partition < len(index.partitions):
        return good
    found = index.partitions[partition]
    for number, chunk in chunks:
        size = min(index.chunk_bytes, found.nbytes - number * index.chunk_bytes)
        stated = found.digests[number] if 0 <= number < len(found.digests) else ""
        if stated and number not in good and chunk_digest(chunk.view[:size]) == stated:
            good[number] = chunk
    return good
