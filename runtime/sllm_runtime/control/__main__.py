"""``python -m sllm_runtime.control``: the controller daemon."""

from __future__ import annotations

import asyncio
import sys

from sllm_runtime.control.daemon import ControllerSettings, lead
from sllm_runtime.platform.daemon import ready, run_daemon
from sllm_runtime.platform.owned import end
from sllm_runtime.platform.telemetry import configure_logging


class Daemon:
    """One controller: it stands by, then leads, until ``stop``. Deposed it ends, and its supervisor starts it anew."""

    def __init__(self, settings: ControllerSettings, stop: asyncio.Event) -> None:
        self._settings, self._stop = settings, stop
        self._leading = False

    async def run(self) -> None:
        """Its whole life. Raises ``StaleTerm``, ``Unavailable``."""
        life = asyncio.create_task(self._life(), name="controller")
        stopped = asyncio.create_task(self._stop.wait(), name="stop")
        try:
            await asyncio.wait([life, stopped], return_when=asyncio.FIRST_COMPLETED)
            if self._leading:
                await asyncio.wait([life])  # it ends in order by itself
        finally:
            await end([life, stopped])
        if not life.cancelled() and (error := life.exception()) is not None:
            raise error

    async def _life(self) -> None:
        settings = self._settings
        # A standby is ready as well: it is there.
        leading = lead(settings, settings.name, settings.chosen_policy(), standing_by=ready, vault_of=settings.vault)
        async with leading as controller:
            self._leading = True
            ready()
            await controller.run(self._stop)


def main() -> int:
    """Run until SIGTERM; the exit status."""

    async def daemon(stop: asyncio.Event) -> None:
        settings = ControllerSettings.load()
        configure_logging("controller", settings.name, settings)
        await Daemon(settings, stop).run()

    return run_daemon(daemon, title="sllm-controller")


if __name__ == "__main__":
    sys.exit(main())
