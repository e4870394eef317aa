"""How much of the pool is made ready ahead: what the next start of this node's models may need."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

import msgspec

from sllm_loaderd.store import ModelStore
from sllm_runtime.protocol.checkpoint import INDEX_NAME
from sllm_runtime.protocol.limits import MIB


class _Part(msgspec.Struct):
    nbytes: int


class _Parts(msgspec.Struct):
    """All that is wanted of an index: it is checked by whoever loads it."""

    partitions: tuple[_Part, ...]


LEAST: Final = 256 * MIB
"""Bytes that are made ready on a node without models: the first one has to be met, too."""


def bytes_ahead(sizes: Mapping[str, int], there: Collection[str], limit: int) -> int:
    """Bytes of free chunks to give their pages: for the largest model (``sizes``) that is not ``there``, in memory.

    At most half of the pool's ``limit``, since free memory with pages is memory that others do not have.
    """
    return min(max([LEAST, *(nbytes for digest, nbytes in sizes.items() if digest not in there)]), limit // 2)


def model_sizes(store: ModelStore) -> dict[str, int]:
    """Bytes of the partitions of each model; one whose index cannot be read is left out. Blocking."""
    sizes = {}
    for digest in store.digests():
        try:
            data = (store.models / digest.removeprefix("sha256:") / INDEX_NAME).read_bytes()
            sizes[digest] = sum(part.nbytes for part in msgspec.json.decode(data, type=_Parts).partitions)
        except (OSError, msgspec.MsgspecError, ValueError):
            continue  # whoever loads it is told why
    return sizes
