"""What a start on a node that lacks the model says of its stages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sllm_invoker.models import record
from sllm_invoker.start_times import StartTimes
from sllm_runtime.protocol.node import Progress
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import CONVERT, SANDBOX, WEIGHTS, Span
from tests.fixtures.invoker import NodeUnderTest, node_under_test
from tests.fixtures.loaderd import loaderd, small_checkpoint
from tests.fixtures.nats import Nats, nats  # noqa: F401 - a fixture is used by being here


class Clock:
    """Seconds, set by hand."""

    now = 7.0

    def __call__(self) -> float:
        return self.now


async def after(clock: Clock, seconds: float) -> str:
    clock.now = 7.0 + seconds
    return "made"


async def test_a_model_that_is_made_beside_it_makes_no_sandbox_slower() -> None:
    clock, told = Clock(), list[Progress]()
    times = StartTimes(told.append, clock)
    clock.now += 0.25
    times.told(Progress(stage=CONVERT))
    assert await times.timed(after(clock, 0.5)) == "made"
    assert await times.timed(after(clock, 1.0)) == "made"
    times.told(Progress(stage=CONVERT, done=5, total=10))
    clock.now = 16.0
    assert times.spans() == (Span(SANDBOX, 0.0, 1000.0), Span(CONVERT, 250.0, 8750.0))
    assert [progress.done for progress in told] == [0, 5]


async def test_without_one_the_sandbox_is_all_there_is() -> None:
    clock = Clock()
    times = StartTimes(lambda progress: None, clock)
    await times.timed(after(clock, 0.5))
    times.told(Progress(stage=WEIGHTS))
    clock.now = 9.0
    assert times.spans() == (Span(SANDBOX, 0.0, 2000.0),)


@pytest.fixture
async def node(nats: Nats, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:  # noqa: F811
    async with node_under_test(nats, tmp_path, loaderd_socket=tmp_path / "loaderd.sock") as under:
        yield under


async def test_the_first_start_of_a_model_on_a_node_has_a_stage_more(node: NodeUnderTest, tmp_path: Path) -> None:
    checkpoint, _ = await asyncio.to_thread(small_checkpoint, tmp_path / "model")
    async with loaderd(tmp_path / "other") as elsewhere:
        model = record(await elsewhere.control.register(str(checkpoint)), str(checkpoint), 0.0)
    async with loaderd(tmp_path):
        first = await node.reaches(await node.begin(model=model), InstanceState.READY)
        second = await node.reaches(await node.begin(model=model), InstanceState.READY)
        assert [span.name for span in first.spans] == ["sandbox", "convert", "import"]
        assert [span.name for span in second.spans] == ["sandbox", "import"]
        _, converted, imported = first.spans
        assert converted.at + converted.ms <= imported.at
        for status in (first, second):
            await node.stop(status.instance)
            await node.reaches(status.instance, InstanceState.STOPPED)
