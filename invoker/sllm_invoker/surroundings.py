"""What an instance needs of its node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sllm_invoker.call import Call
from sllm_invoker.logs import InstanceLog
from sllm_invoker.preparation import Suppliers


@dataclass(frozen=True)
class Surroundings:
    """Its log, and who is told of it, beside what it is made of."""

    suppliers: Suppliers
    log: InstanceLog
    ready: Callable[[Call], None]
    consumed: Callable[[Call, int], None]
    moved: Callable[[], None]
    changed: Callable[[], None]
    counted: Callable[[], None]
    clock: Callable[[], float]
    killed_for_memory: Callable[[], bool]
    """Whether the kernel has killed something here for lack of memory just now."""
