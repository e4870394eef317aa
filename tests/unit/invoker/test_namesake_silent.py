"""A node that goes since its name is another one's says nothing more under it while it ends."""

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
from sllm_runtime.protocol.errors import Conflict
from sllm_runtime.protocol.node import NodeStatus
from tests.fixtures.invoker import SCRIPTED, NodeUnderTest
from tests.fixtures.nats import NODE, Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import GIVE_UP_S
from tests.unit.invoker.test_node import node  # noqa: F401 - a fixture is used by being here


async def test_one_that_took_part_is_silent_from_the_moment_it_is_to_go(
    node: NodeUnderTest,  # noqa: F811
    nats: Nats,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two that began within ``name_wait`` both take part. Each report of the one is the end of what the other runs."""
    given = InvokerSettings.load(
        nats.env(NODE), node=NODE, data_dir=tmp_path / "2", loaderd_socket=tmp_path / "none", loader_wait=0.0,
        name_wait=0.0, pool_size=1, refill_delay=0.0,
    )  # fmt: skip
    bus = await nats.bus(NODE)
    driver = ProcessDriver(sandbox_environment(os.environ, given), argv=tuple(SCRIPTED), isolate=given.isolate)
    later = Node(given, bus, driver)
    publish, told = bus.publish_now, list[bool]()

    def heard(subject: str, message: Any) -> None:
        if subject == subjects.status(NODE) and isinstance(message, NodeStatus):
            told.append(later._namesake.goes)
        publish(subject, message)

    monkeypatch.setattr(bus, "publish_now", heard)
    close = later._instances.close

    async def slow() -> None:  # workers have a second of grace, and their calls more
        await asyncio.sleep(2.5)
        await close()

    monkeypatch.setattr(later._instances, "close", slow)
    with pytest.raises(Conflict):
        async with asyncio.timeout(GIVE_UP_S):
            await later.run(asyncio.Event(), lambda: None)
    assert told
    assert True not in told, f"{told.count(True)} reports of a node that is to go"
