"""What the conversion's process says to the daemon, one JSON object per line."""

from __future__ import annotations

import msgspec

from sllm_loaderd.sources import Entry
from sllm_runtime.protocol.errors import ErrorBody


class ChildProgress(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes done of bytes in all, in a stage: fetch or convert."""

    stage: str
    done: int
    total: int


class ChildReady(msgspec.Struct, frozen=True, tag="ready"):
    """Everything is on this machine; the conversion begins when a line comes back. Others may have to end before."""


class ChildOutcome(msgspec.Struct, frozen=True, tag="outcome"):
    """``digest`` of the checkpoint in the staging directory; empty if the source is what it was (``known``).

    ``entries``: the partitions, where they stay at the source and every load reads them from there.
    """

    digest: str
    fingerprint: str
    entries: tuple[Entry, ...] = ()


class ChildError(msgspec.Struct, frozen=True, tag="error"):
    """Why there is no checkpoint."""

    error: ErrorBody


ChildMessage = ChildProgress | ChildReady | ChildOutcome | ChildError
