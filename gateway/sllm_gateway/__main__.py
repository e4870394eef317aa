"""``python -m sllm_gateway``: the gateway as a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator

from prometheus_client import disable_created_metrics

from sllm_gateway.app import Gateway, running
from sllm_gateway.server import listen, make_server
from sllm_gateway.settings import GatewaySettings
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.daemon import ready, run_daemon
from sllm_runtime.platform.owned import Tasks
from sllm_runtime.platform.telemetry import configure_logging
from sllm_runtime.protocol.errors import SllmError

log = logging.getLogger("sllm_gateway")


async def serve(settings: GatewaySettings, stop: asyncio.Event) -> None:
    """Serve until ``stop`` is set, then drain."""
    settings.token()  # a wrong address or token is said before anything is started
    tasks = Tasks("daemon", on_failure=lambda _: stop.set())
    with contextlib.ExitStack() as opened:

        def listening(port: int | None = None) -> list[socket.socket]:
            return [opened.enter_context(contextlib.closing(each)) for each in listen(settings, port)]

        listeners = listening()
        tellers = listening(settings.metrics_port) if settings.metrics_port is not None else []
        name = f"sllm-gateway {settings.gateway}"
        bus = await Bus.connect(settings, settings.gateway, name=name, kind="gateway")
        try:
            async with running(bus, settings) as gateway:
                server = make_server(gateway, settings)
                serving = tasks.start(server.serve(listeners), "http")
                for host, port in (listener.getsockname()[:2] for listener in listeners):
                    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
                async with _telling(gateway, settings, tellers, tasks):
                    ready()
                    await stop.wait()
                    await server.finish(serving, gateway.drain())
        finally:
            await tasks.close()
            await bus.close()


@contextlib.asynccontextmanager
async def _telling(
    gateway: Gateway, settings: GatewaySettings, listeners: list[socket.socket], tasks: Tasks
) -> AsyncIterator[None]:
    """Probes and metrics are answered on these inside: no caller comes there, so they are open while calls end."""
    if not listeners:
        yield
        return
    server = make_server(gateway.telling, settings)
    serving = tasks.start(server.serve(listeners), "metrics")
    try:
        yield
    finally:
        await server.finish(serving, asyncio.sleep(0))


def main() -> int:
    """Exit status 0 after a stop that was asked for, 1 after an error."""
    try:
        settings = GatewaySettings.load()
    except SllmError as error:
        sys.stderr.write(f"sllm-gateway: {error.message}\n")
        return error.exit_code
    disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each series, which nobody reads
    configure_logging("gateway", settings.gateway, settings)
    return run_daemon(lambda stop: serve(settings, stop), title="sllm-gateway")


if __name__ == "__main__":
    sys.exit(main())
