"""A vault that hangs holds up who needs it, and nothing else of its controller."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.control import deploy, nodes
from sllm_runtime.control.vault import DirectoryVault
from sllm_runtime.protocol.errors import Unavailable
from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.waiting import until
from tests.unit.control.bench import Bench, manifest


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


async def test_a_start_whose_secrets_are_not_had_says_so(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is its node that is blamed, after half a minute in which that was asked for nothing."""
    await bench.controller.service._vault.put("token", b"x")
    await bench.gateway.deploy(manifest(secrets=["token"], min_instances=0))
    answers, asked = threading.Event(), 0
    real = DirectoryVault._read

    def hangs(self: DirectoryVault, names: Any) -> Any:
        nonlocal asked
        asked += 1
        answers.wait(30)
        return real(self, names)

    (first,) = bench.live()
    bench.node.starts.clear()
    monkeypatch.setattr(nodes, "RPC_TIMEOUT_S", 0.2)
    with monkeypatch.context() as patched:
        patched.setattr(DirectoryVault, "_read", hangs)
        try:
            bench.node.put(first, InstanceState.FAILED)
            await bench.none_left()
            asking = asyncio.create_task(bench.gateway.acquire())
            await until(lambda: "secrets" in bench.controller.loop.view.why(("chat", 1)), what="it is said why")
            assert not bench.node.starts
        finally:
            answers.set()
    await asking
    await until(lambda: bench.node.starts, what="it is started once they are there again")
