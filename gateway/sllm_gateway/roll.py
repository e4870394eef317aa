"""Which lives of gateways are over, told by beats alone: no clock of another machine counts. No I/O."""

from __future__ import annotations

from typing import Final

from sllm_runtime.protocol.calls import PREFIX
from sllm_runtime.protocol.lives import OVERDUE_BEATS, SILENT_BEATS, TAG, Life

MOST: Final = 256
"""Lives that are remembered, with those that are over and done with."""


class Roll:
    """All lives that one gateway has heard of, its own among them."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self._lives: dict[str, Life] = {}
        self._silent: dict[str, int] = {}
        """Own beats since it was heard."""
        self._left: set[str] = set()
        """Lives whose gateways have left NATS since they were heard."""
        self._beats: dict[str, int] = {}

    def heard(self, life: Life) -> None:
        """Its record, as it is now. Told again it is no beat."""
        if self._lives.get(life.life) == life:
            return
        if life.life not in self._lives and len(self._lives) >= MOST:
            self._forget_oldest()
        self._lives[life.life] = life
        self._silent[life.life] = 0
        self._left.discard(life.life)
        self._beats[life.life] = self._beats.get(life.life, 0) + 1

    def _forget_oldest(self) -> None:
        oldest = next((life for life in self._lives.values() if life.settled), None)
        if oldest is not None:
            for known in (self._lives, self._silent, self._beats):
                known.pop(oldest.life, None)
            self._left.discard(oldest.life)

    def beat(self) -> None:
        """A beat of one's own was acknowledged: others that live could beat as well."""
        for life in self._silent:
            self._silent[life] += 1

    def over(self, life: str, me: str) -> bool | None:
        """Whether it has ended; None: nothing is known of it. ``me``: one's own life."""
        found = self._lives.get(life)
        if found is None:
            return None
        if life == me:
            return False
        if found.gateway == self._gateway:  # names are unique: it is an earlier one
            return True
        return found.over or bool(found.heir) or life in self._left or self._silent[life] >= SILENT_BEATS

    def overdue(self, me: str) -> set[str]:
        """Gateways of lives that should have beaten since, and are not over."""
        return {life.gateway for life in self.living(me) if self._silent[life.life] >= OVERDUE_BEATS}

    def left(self, gateway: str) -> None:
        """It has left NATS: those of its lives that are overdue are over before their silence says so."""
        of_it = (name for name, life in self._lives.items() if life.gateway == gateway and not life.settled)
        self._left.update(name for name in of_it if self._silent[name] >= OVERDUE_BEATS)

    def abandoned(self, me: str) -> list[Life]:
        """Lives that are over, and whose streams nobody who lives takes over."""
        return [
            life
            for life in self._lives.values()
            if not life.settled and self.over(life.life, me) and self._ownerless(life.heir, me)
        ]

    def _ownerless(self, heir: str, me: str) -> bool:
        return heir in ("", me) or self.over(heir, me) is not False

    def living(self, me: str) -> list[Life]:
        """Lives of others that are not over."""
        return [life for life in self._lives.values() if life.life != me and self.over(life.life, me) is False]

    def beat_of(self, life: str) -> int:
        """The last one that was heard; -1: none."""
        return self._lives[life].beat if life in self._lives else -1

    def of_call(self, call: str) -> Life | None:
        """The life that made a call, by its id."""
        tag = call.removeprefix(PREFIX)[:TAG]
        return next((life for name, life in self._lives.items() if name[:TAG] == tag), None)

    def beats(self, life: str) -> int:
        """How often it was heard."""
        return self._beats.get(life, 0)
