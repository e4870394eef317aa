"""Of which call's trace a request is, over the control socket."""

import asyncio
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sllm_loaderd.client import LoaderControl
from sllm_loaderd.daemon.control import ControlConnection
from sllm_runtime.platform import trace
from sllm_runtime.platform.wire import AsyncWire

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


async def test_what_is_done_for_a_request_belongs_to_the_trace_of_who_asks(tmp_path: Path) -> None:
    """Also where requests of several traces share a connection."""
    heard: dict[str, str] = {}

    async def delete(model: str) -> None:
        heard[model] = trace.current()

    service = cast(Any, SimpleNamespace(delete=delete, settings=SimpleNamespace(node="n1")))
    holders = cast(Any, SimpleNamespace(owner_lost=lambda _: None))
    path = tmp_path / "loaderd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        opening = asyncio.create_task(LoaderControl(path).open())
        accepted, _ = await asyncio.get_running_loop().sock_accept(listener)
        accepted.setblocking(False)
        serving = asyncio.create_task(ControlConnection(AsyncWire(accepted), service, holders).serve())
        control = await opening
        with trace.within(TRACE):
            await control.delete("a")
        await control.delete("b")
        await control.close()
        await serving
    assert heard == {"a": TRACE, "b": ""}
