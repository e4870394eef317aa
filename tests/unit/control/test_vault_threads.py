"""A vault that hangs holds up who needs it, and nothing else of its controller."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.control import deploy, nodes, plan
from sllm_runtime.control.vault import DirectoryVault
from sllm_runtime.protocol.errors import SllmError, Unavailable
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.nats import Nats
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, manifest
from tests.unit.control.scripted_node import ScriptedNode


async def test_looks_that_were_given_up_take_no_thread_of_others(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployments, answers = bench.controller.service._deployments, threading.Event()

    def hangs(self: DirectoryVault, names: Any) -> Any:
        answers.wait(30)  # its directory is on a server that is gone
        raise OSError

    monkeypatch.setattr(DirectoryVault, "_read", hangs)
    monkeypatch.setattr(deploy, "RPC_TIMEOUT_S", 0.02)
    monkeypatch.setattr(deployments, "_vault", DirectoryVault(tmp_path))
    try:
        for _ in range(40):
            async with deployments.holding(("token",)):
                with pytest.raises(Unavailable):
                    await deployments.look(("token",))
        await asyncio.wait_for(asyncio.to_thread(int), 5)  # as a look-up of NATS's address, or ``spread``
    finally:
        answers.set()


@dataclass
class Without:
    """``answers``: when the vault does; ``asked``: how often it was."""

    answers: threading.Event = field(default_factory=threading.Event)
    asked: int = 0


@pytest.fixture
async def without_secrets(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Without]:
    """A function with a secret whose instance has failed, and a vault that does not answer."""
    await bench.controller.service._vault.put("token", b"x")
    await bench.gateway.deploy(manifest(secrets=["token"], min_instances=0))
    found, real = Without(), DirectoryVault._read

    def hangs(self: DirectoryVault, names: Any) -> Any:
        found.asked += 1
        found.answers.wait(30)
        return real(self, names)

    (first,) = bench.live()
    bench.node.starts.clear()
    monkeypatch.setattr(DirectoryVault, "_read", hangs)
    bench.node.put(first, InstanceState.FAILED)
    await bench.none_left()
    yield found
    found.answers.set()


async def test_a_start_whose_secrets_are_not_had_says_so(
    bench: Bench, without_secrets: Without, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is its node that is blamed, after half a minute in which that was asked for nothing."""
    monkeypatch.setattr(nodes, "RPC_TIMEOUT_S", 0.2)
    asking = asyncio.create_task(bench.gateway.acquire())
    await until(lambda: "secrets" in bench.controller.loop.view.why(("chat", 1)), what="it is said why")
    assert not bench.node.starts
    without_secrets.answers.set()
    await asking
    await until(lambda: bench.node.starts, what="it is started once they are there again")


async def test_a_start_that_was_given_up_for_its_secrets_is_not_begun_when_they_come(
    bench: Bench, without_secrets: Without, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start is sent again while the first sending still waits for the secrets: where that one gives up, the instance
    is placed anew, and its node is not to begin what nobody wants any more."""
    monkeypatch.setattr(nodes, "RPC_TIMEOUT_S", 1.5)
    asking = asyncio.create_task(bench.gateway.acquire())
    await until(lambda: without_secrets.asked == 2, what="it is sent again")
    (given_up,) = bench.live()
    await until(lambda: given_up not in bench.live(), what="the first sending gave up")
    without_secrets.answers.set()
    await asking
    await until(lambda: bench.node.starts, what="another one is started")
    assert given_up not in {command.instance for command in bench.node.starts}


async def test_a_trial_whose_secrets_never_come_has_an_end(
    bench: Bench, nats: Nats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its instance is given up and placed anew for as long as they do not: no reason to wait for ever."""

    class Hanging:
        async def read(self, names: Any) -> Any:
            await asyncio.Event().wait()

    await bench.controller.service._vault.put("token", b"x")
    monkeypatch.setattr(bench.controller.loop._nodes, "_vault", Hanging())
    monkeypatch.setattr(nodes, "RPC_TIMEOUT_S", 1.5)
    monkeypatch.setattr(plan, "TAKE_S", 3.0)
    monkeypatch.setattr(deploy, "TAKE_S", 3.0)
    async with ScriptedNode(await nats.bus("n2"), "n2") as other:
        await until(lambda: "n2" in bench.controller.loop.view.nodes, what="both nodes are known")
        with pytest.raises(SllmError, match="secrets cannot be read"):
            await asyncio.wait_for(bench.gateway.deploy(manifest(secrets=["token"], queue_timeout=4)), 30)
        assert not bench.node.starts
        assert not other.starts
