"""A vault that hangs holds up who needs it, and nothing else of its controller."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from sllm_runtime.control import deploy
from sllm_runtime.control.vault import DirectoryVault
from sllm_runtime.protocol.errors import Unavailable
from tests.unit.control.bench import Bench


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
