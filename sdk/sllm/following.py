"""What becomes of a stream that broke off: it is read on at another gateway of the profile, from after the last event,
or what is asked for by a name is asked for there. No I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sllm.answers import Trace, of_a_proxy
from sllm.gateways import Gateways
from sllm.sse import Event
from sllm.transport import Unreached
from sllm_runtime.protocol.errors import CallMoved, InstanceLost, SllmError, Unauthorized, Unavailable
from sllm_runtime.protocol.http import CALLS

FOLLOW_S: Final = 30.0
"""A gateway that dies is found dead, or started again, within seconds; so long it is asked for."""
CANCEL_S: Final = 1.0
"""To leave a stream that is read on is no end of its call, which is asked for; who leaves waits no longer for that."""
_OPERATION_S: Final = 0.5
_WAITS_S: Final = (0.0, 0.1, 0.2, 0.5, 1.0)


@dataclass
class Following:
    """One stream over all of its connections, at any of ``gateways``: a call's, or what ``source`` names."""

    gateways: Gateways
    source: str = ""
    """Path and query of what has no end; empty: it is a call's, which its first answer names."""
    call: str | None = None
    """Once the stream has broken off."""
    last: str | None = None
    """Id of the last event that is here."""
    numbered: bool = True
    """False: something came that cannot be read on from, of a gateway of before."""
    lost: SllmError | None = None
    """How it broke off, since nothing has come after that."""
    _since: float = 0.0
    _tries: int = 0
    _reads_on: bool = False

    def seen(self, event: Event) -> None:
        """An event is here. Of a call that counts which is whole; of what has no end a heartbeat too, since nothing may
        happen for hours."""
        if not self.source and (event.id is None or event.event != "message"):
            return
        if event.id is not None:
            self.last = event.id
        elif event.comment is None and not event.done:
            self.numbered = False
        self.lost, self._tries = None, 0

    def is_no_end(self, event: Event) -> bool:
        """Whether an error event is none of what is read: its gateway says that another one has it, or, once it is read
        on, that it cannot be read just now."""
        if event.event != "error":
            return False
        code = json.loads(event.data)["error"].get("code")
        return code == CallMoved.code or (self._reads_on and code == Unavailable.code)

    def broke(self, error: SllmError, trace: Trace, now: float) -> float:
        """Seconds to wait before the next gateway is asked. Raises how the stream broke off where that helps nothing:
        it did not break off, it cannot be read on, no gateway has it, or none answers."""
        if self.lost is None:
            again = isinstance(error, CallMoved) or (self._reads_on and isinstance(error, Unavailable))
            silent = bool(self.source) and isinstance(error, InstanceLost)  # it only reads
            if not (trace.broken or again or silent) or not self._can_be_read_on(trace):
                raise error
            self.lost, self.call, self._since = error, self.call or trace.call, now
            self._reads_on = True
        elif self.source and isinstance(error, Unauthorized):  # whoever reads on with that token is let in nowhere
            raise error from self.lost
        elif not error.retryable or (now - self._since > FOLLOW_S and self._tries >= len(self.gateways)):
            raise self.lost from error
        trace.call = self.call
        self._tries += 1
        if trace.gateway is not None:
            self.gateways.past(trace.gateway)
            trace.gateway = None  # ``Asking`` is past who says nothing: what came before is of no account then
        return _WAITS_S[min((self._tries - 1) // len(self.gateways), len(_WAITS_S) - 1)]

    def _can_be_read_on(self, trace: Trace) -> bool:
        return self.numbered if self.source else bool(self.call or trace.call)

    @property
    def path(self) -> str:
        """Where to read on."""
        return self.source or f"{CALLS}/{self.call}/events"

    @property
    def cancel(self) -> str:
        """Where to have the call ended."""
        return f"{CALLS}/{self.call}/cancel"

    @property
    def headers(self) -> Mapping[str, str]:
        return {"Last-Event-ID": self.last} if self.last is not None else {}


@dataclass
class Losing:
    """One operation that is sent again, under its own name, to the next of ``gateways``."""

    gateways: Gateways
    again_s: float
    """So long after it was lost it is."""
    _since: float | None = None
    _silent: int = 0
    """How many, one after the other, have said nothing."""

    def wait(self, error: SllmError, trace: Trace, began: float, now: float) -> float:
        """Seconds to wait before it is sent again. Raises ``error`` where that is the answer, or the time is over; what
        had gone on for longer than that is lost anew, as where the next one is yet to be asked."""
        nothing = trace.gateway is None or of_a_proxy(error)  # has come of it; of none that took no connection either
        unheard = len(self.gateways) if isinstance(error, Unreached) else 1
        self._silent = self._silent + unheard if nothing else 0
        if self._since is None or (now - began > self.again_s and self._silent < len(self.gateways)):
            self._since = now
        if not (trace.broken or nothing) or now - self._since >= self.again_s:
            raise error
        if trace.gateway is not None:  # else ``Asking`` is past it
            self.gateways.past(trace.gateway)
        return _OPERATION_S
