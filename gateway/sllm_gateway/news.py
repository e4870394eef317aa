"""What an operator follows of calls: events of those that wait, begin cold, go on elsewhere, or are cancelled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final, Protocol

from sllm_gateway.call import Call
from sllm_runtime.platform import trace
from sllm_runtime.platform.announce import Announcer
from sllm_runtime.platform.bus import Bus
from sllm_runtime.protocol.events import Kind

log = logging.getLogger(__name__)


class Tell(Protocol):
    """Tells what happens to calls."""

    def __call__(self, kind: Kind, call: Call, why: str, others: Sequence[Call] = ()) -> None:
        """That this has happened to the call, and why; to ``others`` at once and for the same reason."""


_SAID: Final = frozenset({Kind.CALL_RESUMED, Kind.CALL_RETRIED, Kind.CALL_MOVED})
"""What is logged where it happens, with more detail."""


class News:
    """Told at a rate of its own, above which it is dropped and counted: a storm of it pushes out neither failed calls
    nor what the gateway says of itself. The log has all of it; what happens to many at once in one line."""

    def __init__(self, bus: Bus, clock: Callable[[], float], wall: Callable[[], float]) -> None:
        self._announcer = Announcer(bus, "gateway", clock, wall)

    def tell(self, kind: Kind, call: Call, why: str, others: Sequence[Call] = ()) -> None:
        """Never waits. See ``Tell``."""
        if kind not in _SAID:
            more = f" (and {len(others)} more)" if others else ""
            with trace.within(call.order.traceparent):  # whoever tells it may be of no request
                log.info("%s: %s%s", kind, why, more, extra={"call": call.id})
            if others and log.isEnabledFor(logging.DEBUG):
                log.debug("%s: %s", kind, " ".join(each.id for each in others))
        for each in (call, *others):
            self._announce(kind, each, why)

    def _announce(self, kind: Kind, call: Call, why: str) -> None:
        binding = call.binding
        self._announcer.tell(
            kind,
            why,
            function=call.version.function,
            version=call.version.number,
            instance=binding.instance if binding is not None else call.marks.instance or None,
            node=binding.node if binding is not None else None,
            call=call.id,
        )
