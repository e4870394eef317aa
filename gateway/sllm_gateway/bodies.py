"""What the bodies of all requests that are being answered take together: each is bounded, and so is their sum."""

from __future__ import annotations

from sllm_runtime.protocol.errors import QueueFull
from sllm_runtime.protocol.quantities import show_bytes


class Bodies:
    """Counts ``most`` bytes at most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._nbytes = 0

    def take(self, nbytes: int) -> None:
        """Raises ``QueueFull`` where there is no room for so many more."""
        if self._nbytes + nbytes > self._most:
            raise QueueFull(
                f"the bodies of requests that this gateway answers have {show_bytes(self._most)} together, as many as"
                " it takes; send it again, or to another gateway"
            )
        self._nbytes += nbytes

    def give_back(self, nbytes: int) -> None:
        """They are no longer needed."""
        self._nbytes -= nbytes


class Share:
    """What one request has of them, until ``close``."""

    __slots__ = ("_bodies", "_nbytes", "refused")

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._nbytes = 0
        self.refused = False
        """Whether there was no room for more of it: the rest was not read."""

    def take(self, nbytes: int) -> None:
        """Raises ``QueueFull``."""
        self.refused = True
        self._bodies.take(nbytes)
        self._nbytes, self.refused = self._nbytes + nbytes, False

    def close(self) -> None:
        """The request is answered."""
        self._bodies.give_back(self._nbytes)
        self._nbytes = 0
