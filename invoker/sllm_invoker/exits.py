"""Why a worker died, in words for the person whose function it was. Pure, but for one counter of the kernel."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from sllm_invoker.sandbox import Exit
from sllm_runtime.protocol.errors import InstanceLost, OutOfMemory, SllmError, StartFailed
from sllm_runtime.protocol.quantities import show_bytes

_NO_MEMORY = re.compile(
    r"MemoryError|std::bad_alloc|[Cc]annot allocate memory|can't allocate memory|out of memory|memory allocation of"
)
_TAIL: Final = 5


def oom_kills() -> int:
    """Processes this kernel has killed for memory since it started; 0 where it does not say."""
    try:
        text = Path("/proc/vmstat").read_text()
    except OSError:
        return 0
    found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def for_lack_of_memory(end: Exit, tail: Sequence[str], killed_for_memory: bool) -> bool:
    """Whether ``end`` looks like memory: the kernel killed somebody meanwhile, or the last lines say so. A container
    knows of itself whether it was the one."""
    if end.out_of_memory is not None and end.signal == signal.SIGKILL:
        return end.out_of_memory
    if end.signal == signal.SIGKILL and not end.asked:
        return killed_for_memory
    return bool(end.code or end.signal) and any(_NO_MEMORY.search(line) for line in tail)


def _last_words(tail: Sequence[str]) -> str:
    lines = [line for line in tail if line.strip()][-_TAIL:]
    return "; its last lines: " + " | ".join(lines) if lines else ""


def start_error(
    instance: str, stage: str, end: Exit, tail: Sequence[str], killed_for_memory: bool, limit: int
) -> SllmError:
    """The error of an instance whose worker died before it was ready."""
    if for_lack_of_memory(end, tail, killed_for_memory):
        return OutOfMemory(
            f"instance {instance} ran out of memory in stage {stage} (limit {show_bytes(limit)}, ended by {end})"
            f"{_last_words(tail)}. Raise `memory` of the function",
            stage=stage,
        )
    return StartFailed(
        f"instance {instance} died in stage {stage}: {end}{_last_words(tail)}. See the function's logs", stage=stage
    )


def lost_error(instance: str, end: Exit, tail: Sequence[str], killed_for_memory: bool, limit: int) -> SllmError:
    """The error of a ready instance whose worker died."""
    lacked = for_lack_of_memory(end, tail, killed_for_memory)
    why = f"ran out of memory (limit {show_bytes(limit)})" if lacked else "died"
    return InstanceLost(f"instance {instance} {why} while it worked on this call: {end}. Call again")
