"""A worker that says what no right worker says harms itself alone: the node, and its other instances, go on."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sllm_runtime.protocol.states import InstanceState
from tests.fixtures.invoker import NodeUnderTest, node_under_test
from tests.fixtures.nats import Nats, nats  # noqa: F401 - a fixture is used by being here
from tests.fixtures.waiting import until


@pytest.fixture
async def node(nats: Nats, tmp_path: Path) -> AsyncIterator[NodeUnderTest]:  # noqa: F811
    async with node_under_test(nats, tmp_path) as under:
        yield under


async def works(node: NodeUnderTest) -> None:
    """The node starts another instance, which answers, and still reports."""
    instance = await node.start()
    _, call = await node.gateway.open(instance, b"still here")
    end = await node.gateway.ended(call)
    assert end.error is None
    assert call.values == [b"still here"]
    heard = len(node.statuses)
    await until(lambda: len(node.statuses) > heard + 1, what="the node reports")


async def test_a_log_message_that_fits_no_message_of_the_bus_does_not_end_the_node(node: NodeUnderTest) -> None:
    instance = await node.start("longlog")
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is None
    await works(node)


async def test_a_start_that_fails_with_a_very_long_error_is_a_failed_start(node: NodeUnderTest) -> None:
    instance = await node.begin("longfail")
    status = await node.reaches(instance, InstanceState.FAILED)
    assert status.error is not None
    assert status.error.code == "start_failed"
    await works(node)


async def test_a_report_stays_small_whatever_workers_say_of_their_start(node: NodeUnderTest) -> None:
    ready = await node.start("longready")
    hanging = [await node.begin("longstage") for _ in range(2)]
    await until(lambda: all(_stage(node, name).startswith("sss") for name in hanging), what="the stages were heard")
    status = node.instance(ready)
    assert status is not None
    said = (status.fingerprint, *status.capabilities, *(span.name for span in status.spans))
    assert sum(map(len, said)) < 10_000
    await works(node)


def _stage(node: NodeUnderTest, instance: str) -> str:
    status = node.instance(instance)
    return status.progress.stage if status is not None and status.progress is not None else ""


@pytest.mark.parametrize("script", ["latefail", "longend"])
async def test_an_error_longer_than_a_frame_still_ends_its_call(node: NodeUnderTest, script: str) -> None:
    instance = await node.start(script)
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    await node.reaches(instance, InstanceState.LOST)
    await until(lambda: node.status.free_memory == node.status.memory, what="what it held is free")
    await works(node)


async def test_a_message_nested_too_deeply_is_refused(node: NodeUnderTest) -> None:
    instance = await node.start("nested")
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "protocol_error"
    await node.reaches(instance, InstanceState.LOST)


@pytest.mark.parametrize("script", ["oddids", "oddusage"])
async def test_numbers_that_cannot_be_end_their_instance(node: NodeUnderTest, script: str) -> None:
    """A gateway would count by them, and send them on."""
    instance = await node.start(script)
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "protocol_error"
    await node.reaches(instance, InstanceState.LOST)
    await works(node)


async def test_descriptors_that_a_worker_sends_do_not_stay_open(node: NodeUnderTest) -> None:
    instance = await node.start("fds=200")
    before = len(os.listdir("/proc/self/fd"))
    _, call = await node.gateway.open(instance)
    end = await node.gateway.ended(call)
    assert end.error is not None
    assert end.error.code == "protocol_error"
    await node.reaches(instance, InstanceState.LOST)
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before, what="they are closed")
