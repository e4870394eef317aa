"""What an operator follows of calls: events of those that wait, begin cold, go on elsewhere, or are cancelled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeAlias

from sllm_gateway.call import Call
from sllm_runtime.platform.announce import Announcer
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol.events import Kind

log = logging.getLogger(__name__)

Tell: TypeAlias = Callable[[Kind, Call, str], None]
"""That this has happened to the call, and why."""
_SAID: Final = frozenset({Kind.CALL_RESUMED, Kind.CALL_RETRIED, Kind.CALL_MOVED})
"""What is logged where it happens, with more detail."""


class News:
    """Told at a rate of its own, above which it is dropped and counted: a storm of it pushes out neither failed calls
    nor what the gateway says of itself. The log has all of it."""

    def __init__(self, bus: Bus, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._announcer = Announcer(bus, "gateway", clock, wall)

    def tell(self, kind: Kind, call: Call, why: str) -> None:
        """Never waits."""
        binding = call.binding
        if kind not in _SAID:
            log.info("%s: %s", kind, why, extra={"call": call.id})
        self._announcer.tell(
            kind,
            why,
            function=call.version.function,
            version=call.version.number,
            instance=binding.instance if binding is not None else call.marks.instance or None,
            node=binding.node if binding is not None else None,
            call=call.id,
        )
