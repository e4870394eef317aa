"""Why a worker died, in words for the person whose function it was. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from enum import Enum
from typing import Final

from sllm_invoker.sandbox import Exit
from sllm_runtime.protocol.errors import InstanceLost, OutOfMemory, SllmError, StartFailed
from sllm_runtime.protocol.quantities import show_bytes

_NO_MEMORY = re.compile(
    r"MemoryError|std::bad_alloc|[Cc]annot allocate memory|can't allocate memory|out of memory|memory allocation of"
)
_TAIL: Final = 5
_NEAR: Final = 0.9
"""Of its limit: who held so much when the kernel killed somebody for memory was the one."""


class Lack(Enum):
    """Whether a worker died for lack of memory."""

    NO = 0
    PERHAPS = 1
    YES = 2


def lack_of_memory(end: Exit, tail: Sequence[str], killed: bool, limit: int, weights: int = 0) -> Lack:
    """Judge ``end``. A container knows of itself what the kernel has done to it. Of a process it is known that somebody
    sent it SIGKILL, whether the kernel has just ``killed`` some process here for memory, and how much this one had of
    its ``limit`` (bytes): that it was this one is said only if it had nearly all of what is not ``weights``, which it
    shares, and whose pages are counted as its own. Else the last lines (``tail``) say.
    """
    if end.orphaned:
        return Lack.PERHAPS if killed and not end.asked else Lack.NO
    if end.signal == signal.SIGKILL:
        if end.out_of_memory is not None:
            return Lack.YES if end.out_of_memory else Lack.NO
        if end.asked or not killed:
            return Lack.NO
        return Lack.YES if 0 < _NEAR * (limit - weights) <= end.peak - weights else Lack.PERHAPS
    said = bool(end.code or end.signal) and any(_NO_MEMORY.search(line) for line in tail)
    return Lack.YES if said else Lack.NO


def _last_words(tail: Sequence[str]) -> str:
    lines = [line for line in tail if line.strip()][-_TAIL:]
    return "; its last lines: " + " | ".join(lines) if lines else ""


def _perhaps(lack: Lack) -> str:
    if lack is not Lack.PERHAPS:
        return ""
    return "; the kernel has just killed a process of this node or machine for lack of memory, perhaps this one"


def start_error(
    instance: str, stage: str, end: Exit, tail: Sequence[str], killed: bool, limit: int, weights: int = 0
) -> SllmError:
    """The error of an instance whose worker died before it was ready."""
    lack = lack_of_memory(end, tail, killed, limit, weights)
    if lack is Lack.YES:
        return OutOfMemory(
            f"instance {instance} ran out of memory in stage {stage} (limit {show_bytes(limit)}, ended by {end})"
            f"{_last_words(tail)}. Raise `memory` of the function",
            stage=stage,
        )
    return StartFailed(
        f"instance {instance} died in stage {stage}: {end}{_perhaps(lack)}{_last_words(tail)}. See the function's logs",
        stage=stage,
    )


def exhausted_at_start(instance: str, stage: str, how: str, limit: int) -> SllmError:
    """The error of an instance that could not get ready for lack of memory. ``how``: what was seen of it."""
    return OutOfMemory(
        f"instance {instance} ran out of memory in stage {stage} (limit {show_bytes(limit)}): it has used up what it"
        f" may have and {how}. Raise `memory` of the function",
        stage=stage,
    )


def exhausted(instance: str, how: str, limit: int) -> SllmError:
    """The error of a ready one that does nothing any more for lack of memory."""
    return InstanceLost(
        f"instance {instance} ran out of memory (limit {show_bytes(limit)}) while it worked on this call: it has used"
        f" up what it may have and {how}. Raise `memory` of the function, or call again"
    )


def lost_error(instance: str, end: Exit, tail: Sequence[str], killed: bool, limit: int, weights: int = 0) -> SllmError:
    """The error of a ready instance whose worker died."""
    lack = lack_of_memory(end, tail, killed, limit, weights)
    if lack is Lack.YES:
        why, remedy = f"ran out of memory (limit {show_bytes(limit)})", "Raise `memory` of the function, or call again"
    else:
        why, remedy = "died", "Call again"
    return InstanceLost(f"instance {instance} {why} while it worked on this call: {end}{_perhaps(lack)}. {remedy}")
