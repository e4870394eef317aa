"""Whether anything at all comes from NATS. Pure; time is handed in."""

from __future__ import annotations

from sllm_runtime.protocol import limits


class Hearing:
    """Of one connection, which may stand while its server, or the way there, stands still."""

    def __init__(self, heard: int, now: float) -> None:
        """``heard``: as ``Bus.heard``."""
        self._heard, self._since = heard, now

    def deaf(self, heard: int, now: float) -> bool:
        """Whether nothing has come for ``DEAF_S``: nobody's silence counts from before ``now``."""
        if heard != self._heard:
            self._heard, self._since = heard, now
        return now - self._since > limits.DEAF_S
