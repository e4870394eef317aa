"""Controllers that start at the same time on three NATS servers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.nats_cluster import NatsCluster
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.streams import ensure_streams
from sllm_runtime.protocol.limits import MIB

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("apart_s", [0.003, 0.01])
async def test_controllers_that_start_together_make_the_streams_of_a_cluster(tmp_path: Path, apart_s: float) -> None:
    """Of those who change a stream at once one is answered: the others find it as it should be, and nobody gives
    up."""

    async def make(number: int) -> None:
        await asyncio.sleep(apart_s * number)
        await ensure_streams(buses[number], 3, bundle_bytes=MIB)

    with NatsCluster(tmp_path / "nats") as nats:
        settings = Settings.load({"SLLM_NATS_URL": nats.url})
        buses = [await Bus.connect(settings, "up", name=f"test {number}") for number in range(3)]
        for _ in range(2):
            await asyncio.gather(*(make(number) for number in range(3)))
        for bus in buses:
            await bus.close()
