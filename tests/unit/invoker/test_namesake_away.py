"""A node that begins as NATS goes away: nobody is heard meanwhile, so it has looked for nobody."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec
import pytest

from sllm_invoker import node as node_module
from sllm_invoker.node import Node, sandbox_environment
from sllm_invoker.process_driver import ProcessDriver
from sllm_invoker.settings import InvokerSettings
from sllm_runtime.protocol import subjects
from sllm_runtime.protocol.errors import Conflict, SllmError
from sllm_runtime.protocol.node import NodeStatus
from tests.fixtures.invoker import SCRIPTED
from tests.fixtures.nats import NODE, Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.unit.invoker.test_namesake import report

AWAY_S = 3.0


async def test_a_node_that_begins_while_nats_is_away_looks_for_its_name_when_it_is_back(
    nats: Nats,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "LISTENS_S", AWAY_S / 3)  # it is away for longer than a node listens
    bus, theirs = await nats.bus(NODE), await nats.bus(NODE)
    given = InvokerSettings.load(
        nats.env(NODE), node=NODE, data_dir=tmp_path / "n", loaderd_socket=tmp_path / "none", loader_wait=0.0
    )
    driver = ProcessDriver(sandbox_environment(os.environ, given), argv=tuple(SCRIPTED), isolate=given.isolate)
    node = Node(given, bus, driver)

    async def lives() -> None:
        for sequence in range(1000):
            with contextlib.suppress(SllmError):
                theirs.publish_now(subjects.status(NODE), msgspec.structs.replace(report("other", sequence), node=NODE))
            await asyncio.sleep(0.6)

    said = list[str]()
    await theirs.subscribe(subjects.status(NODE), NodeStatus, lambda status, _: said.append(status.boot))
    running = asyncio.create_task(node.run(asyncio.Event(), lambda: None))
    await asyncio.wait_for(node._namesake._listens.wait(), 10)
    await nats.kill()
    other = asyncio.create_task(lives())
    await asyncio.sleep(AWAY_S)
    await nats.start()
    await asyncio.wait({running}, timeout=15)
    other.cancel()
    running.cancel()
    assert set(said) == {"other"}, "one report of this life says that all that the other one runs is gone"
    with pytest.raises(Conflict, match="another node is there"):
        await running
