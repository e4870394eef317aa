"""What a start is told that no node has room for, where one could come. Pure."""

from __future__ import annotations

from dataclasses import replace

from sllm_runtime.control.fits import Need
from sllm_runtime.control.providing.packing import fits
from sllm_runtime.control.providing.pool import Errand
from sllm_runtime.control.reason import Reason, Words
from sllm_runtime.control.view import Key, View
from sllm_runtime.protocol.node import AWAITS_NODE, Progress


def need_of_errand(errand: Errand) -> Need:
    """What it needs of its node."""
    return Need(errand.cpu, errand.memory, errand.gpus, errand.gpu_memory)


def could_come(view: View, need: Need) -> bool:
    """Whether a node that the provider makes would do."""
    pool = view.pool
    if pool is None or pool.offer is None or pool.shape is None:
        return False
    return pool.offer.most > 0 and fits(need, pool.shape)


def awaited(view: View, need: Need, now: float) -> Progress | None:
    """How long until a node comes for it, as expected; None if none will: no provider, one that has its most, or none
    that fits."""
    pool = view.pool
    if pool is None or not could_come(view, need) or (pool.full and not pool.coming):
        return None
    left = pool.left_s(now)
    when = f"expected in {left:.0f} s" if left else f"expected by now, boots take {pool.boot_s:.0f} s"
    what = f"{len(pool.coming)} on the way" if pool.coming else "one is asked for"
    total = round(pool.boot_s)
    return Progress(
        stage=AWAITS_NODE,
        done=min(max(total - round(left), 0), total),
        total=total,
        unit="s",
        message=f"waiting for a node: {what}, {when}",
    )


def told(view: View, key: Key, need: Need, reason: Words, now: float) -> tuple[View, Words]:
    """``view`` with what version ``key`` waits for, and why it waits, in words: ``reason`` says what there is no room
    for."""
    progress = awaited(view, need, now)
    if progress is None:
        at_most = view.pool is not None and view.pool.full and could_come(view, need)
        return view, Reason(lambda: f"{reason}; the provider of nodes has its most") if at_most else reason
    message = progress.message
    return replace(view, awaiting={**view.awaiting, key: progress}), Reason(lambda: f"{message}; {reason}")


def longest_s(view: View, key: Key) -> float:
    """Seconds that a start of version ``key`` may wait for a node that is on its way; 0: it waits for none."""
    return view.pool.timing.lost if view.pool is not None and key in view.awaiting else 0.0
