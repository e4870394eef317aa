"""``python -m sllm_runtime.control``: the controller daemon."""

from __future__ import annotations

import asyncio
import sys

from sllm_runtime.control.daemon import ControllerSettings, lead
from sllm_runtime.platform.daemon import ready, run_daemon
from sllm_runtime.platform.telemetry import configure_logging


async def _main(settings: ControllerSettings, stop: asyncio.Event) -> None:
    async with lead(settings, settings.name, settings.chosen_policy()) as controller:
        ready()
        await controller.run(stop)


def main() -> int:
    """Run until SIGTERM; the exit status."""

    async def daemon(stop: asyncio.Event) -> None:
        settings = ControllerSettings.load()
        configure_logging("controller", settings.name, settings)
        await _main(settings, stop)

    return run_daemon(daemon, title="sllm-controller")


if __name__ == "__main__":
    sys.exit(main())
