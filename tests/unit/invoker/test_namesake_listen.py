"""A node that cannot listen for its name says so, and does not wait for ever."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from sllm_invoker.node import Node, sandbox_environment
from sllm_invoker.process_driver import ProcessDriver
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import Unavailable
from tests.fixtures.invoker import SCRIPTED
from tests.fixtures.nats import NODE, Nats, nats  # noqa: F401 - a fixture is used by being here


async def test_a_node_whose_subscription_fails_ends_with_that(
    nats: Nats,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = await nats.bus(NODE)
    subscribe = bus.subscribe

    async def refused(subject: str, *rest: Any, **options: Any) -> Any:
        if subject == subjects.status(NODE):
            raise Unavailable(f"cannot subscribe to {subject}")
        return await subscribe(subject, *rest, **options)

    monkeypatch.setattr(bus, "subscribe", refused)
    given = InvokerSettings.load(
        nats.env(NODE), node=NODE, data_dir=tmp_path / "n", loaderd_socket=tmp_path / "none", loader_wait=0.0
    )
    driver = ProcessDriver(sandbox_environment(os.environ, given), argv=tuple(SCRIPTED), isolate=given.isolate)
    with pytest.raises(Unavailable, match="cannot subscribe"):
        async with asyncio.timeout(10):
            await Node(given, bus, driver).run(asyncio.Event(), lambda: None)
