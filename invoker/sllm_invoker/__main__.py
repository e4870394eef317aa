"""``python -m sllm_invoker``: the invoker of one node."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys

from sllm_invoker.containers import choice
from sllm_invoker.node import Node, sandbox_environment
from sllm_invoker.process_driver import ProcessDriver
from sllm_invoker.sandbox import SandboxDriver
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.platform import descriptors
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.daemon import ready, run_daemon
from sllm_runtime.platform.process import become_subreaper, end_orphans
from sllm_runtime.platform.telemetry import configure_logging
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger(__name__)


async def serve(settings: InvokerSettings, stop: asyncio.Event) -> None:
    """One node until ``stop``. Raises ``Unavailable`` if the bus cannot be reached, or no container where one must be
    had."""
    notes: list[str] = []

    def warn(text: str) -> None:
        log.warning(text)
        notes.append(text)

    engine = await choice.engine_for(settings, warn)
    bus = await Bus.connect(settings, settings.node, name=f"sllm-invoker {settings.node}", jetstream=False)
    environment = sandbox_environment(os.environ, settings)
    driver: SandboxDriver
    images = None
    if engine is not None:
        outer = {key: value for key, value in os.environ.items() if not key.startswith("SLLM_")}
        images = choice.images(settings, engine, outer)
        driver = choice.driver(settings, engine, images)
    else:
        driver = processes = ProcessDriver(
            environment,
            argv=settings.fork_server,
            isolate=settings.isolate,
            on_end=lambda: end_orphans({processes.fork_server_pid}),
        )
    try:
        await Node(settings, bus, driver, images).run(stop, lambda: ready(" ".join(notes)))
    finally:
        await bus.close()


def main() -> int:
    """The exit status."""
    try:
        settings = InvokerSettings.load()
    except SllmError as error:
        sys.stderr.write(f"sllm-invoker: {error.message}\n")
        return error.exit_code
    configure_logging("invoker", settings.node, settings)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # of nothing that is started from here: it has users' data
    become_subreaper()  # what outlives a fork server comes to us, and is ended

    async def run(stop: asyncio.Event) -> None:
        await serve(settings, stop)

    return run_daemon(run, title=f"sllm-invoker {settings.node}", files=descriptors.HANDED_ON)


if __name__ == "__main__":
    sys.exit(main())
