"""When a node's report is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from sllm_invoker import report
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.node import NodeStatus
from tests.fixtures.waiting import GIVE_UP_S, until


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the reports that were sent. None is sent for its time alone."""
    monkeypatch.setattr(limits, "HEARTBEAT_S", 20 * GIVE_UP_S)
    return []


@pytest.fixture
async def reporter(sent: list[int]) -> AsyncIterator[report.Reporter]:
    def compose(sequence: int) -> NodeStatus:
        return NodeStatus(node="n", boot="b", sequence=sequence, term=1, cpu=1.0, memory=1, free_cpu=1.0, free_memory=1)

    async def publish(status: NodeStatus) -> None:
        sent.append(status.sequence)

    made = report.Reporter(compose, publish)
    running = asyncio.create_task(made.run())
    yield made
    await end([running])


async def test_an_instance_that_has_moved_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch, sent: list[int], reporter: report.Reporter
) -> None:
    await until(lambda: sent == [1], what="the first report")
    monkeypatch.setattr(report, "COALESCE_S", 10 * GIVE_UP_S)
    reporter.moved()
    await until(lambda: sent == [1, 2], what="its report")
    reporter.changed()
    for _ in range(100):
        await asyncio.sleep(0)
    assert sent == [1, 2], "it comes with those after it"
    reporter.moved()
    await until(lambda: sent == [1, 2, 3], what="that of the next one, and of what has changed")


async def test_changes_come_together(sent: list[int], reporter: report.Reporter) -> None:
    await until(lambda: sent == [1], what="the first report")
    for _ in range(3):
        reporter.changed()
    await until(lambda: sent == [1, 2], what="one for all of them")


async def test_the_first_call_after_a_quiet_time_is_told_at_once_the_next_ones_together(
    monkeypatch: pytest.MonkeyPatch, sent: list[int], reporter: report.Reporter
) -> None:
    await until(lambda: sent == [1], what="the first report")
    monkeypatch.setattr(limits, "COUNTS_S", 10 * GIVE_UP_S)
    reporter.counted()
    await until(lambda: sent == [1, 2], what="the first call")
    for _ in range(3):
        reporter.counted()
    await asyncio.sleep(3 * report.COALESCE_S)
    assert sent == [1, 2], "calls that begin and end all the time are not each a report"
    reporter.moved()
    await until(lambda: sent == [1, 2, 3], what="one that is sent for something else says their number too")
