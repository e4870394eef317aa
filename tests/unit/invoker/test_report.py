"""When a node's report is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from sllm_invoker import report
from sllm_invoker.bounds import REPORTED_BYTES
from sllm_runtime.platform.owned import end
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.codec import pack
from sllm_runtime.protocol.errors import StartFailed
from sllm_runtime.protocol.node import InstanceStatus, NodeStatus
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.timeline import Span
from tests.fixtures.waiting import GIVE_UP_S, until


def status(sequence: int, models: Sequence[str] = (), **more: Any) -> NodeStatus:
    return NodeStatus(
        node="n",
        boot="b",
        sequence=sequence,
        term=1,
        cpu=1.0,
        memory=1,
        free_cpu=1.0,
        free_memory=1,
        models=tuple(models),
        **more,
    )


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the reports that were sent. None is sent for its time alone."""
    monkeypatch.setattr(limits, "HEARTBEAT_S", 20 * GIVE_UP_S)
    return []


@pytest.fixture
async def reporter(sent: list[int]) -> AsyncIterator[report.Reporter]:
    async def publish(status: NodeStatus) -> None:
        sent.append(status.sequence)

    made = report.Reporter(status, publish)
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


def test_a_report_tells_of_as_many_models_as_it_has_room_for() -> None:
    """Those in memory first, then those on the disk: a node that sends none counts as silent."""
    names = [f"sha256:{number:064x}" for number in range(9_000)]
    whole = status(1, models=names, remote=tuple(names[:8_000]), resident=(names[5_000],), copied={names[8_500]: 1})
    assert report.fitted(status(1, models=names[:100])).models == tuple(names[:100])
    told = report.fitted(whole)
    assert limits.MAX_REPORT - 1024 < len(pack(told)) <= limits.MAX_REPORT
    assert told.resident == whole.resident
    assert told.copied == whole.copied
    assert set(told.models) > {names[5_000], *names[8_000:]}
    assert told.remote == (*told.models[: len(told.remote) - 1], names[5_000])
    assert told.untold == 9_000 - len(told.models)


async def test_a_report_that_is_cut_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sent = list[NodeStatus]()

    async def publish(status: NodeStatus) -> None:
        sent.append(status)

    names = [f"sha256:{number:064x}" for number in range(9_000)]
    made = report.Reporter(lambda sequence: status(sequence, models=names), publish)
    await made.send()
    await made.send()
    assert [each.untold for each in sent] == [sent[0].untold] * 2
    assert sent[0].untold == 9_000 - len(sent[0].models) > 0
    assert caplog.text.count("has no room for all models") == 1


def instances(state: InstanceState, count: int, **more: Any) -> tuple[InstanceStatus, ...]:
    return tuple(
        InstanceStatus(instance=f"{state}-{number:06d}", function="f" * 40, version=1, state=state, **more)
        for number in range(count)
    )


def living(told: NodeStatus) -> list[str]:
    return [each.instance for each in told.instances if each.state is InstanceState.READY]


LONG = StartFailed("e" * REPORTED_BYTES).body()
MODELS = tuple(f"sha256:{number:064x}" for number in range(100))


def test_errors_of_starts_that_failed_do_not_silence_a_node() -> None:
    """A start that fails is made again, on a node that no other one stands in for, and each that did is told of for a
    minute."""
    failed, ready = instances(InstanceState.FAILED, 280, error=LONG), instances(InstanceState.READY, 50)
    told = report.fitted(status(1, models=MODELS, instances=(*failed, *ready)))
    assert len(pack(told)) <= limits.MAX_REPORT
    assert told.models == MODELS
    assert [each.instance for each in told.instances] == [each.instance for each in (*failed, *ready)]
    errors = [len(each.error.message) for each in told.instances if each.error is not None]
    assert errors == sorted(errors)
    assert set(errors) == {report.BRIEF_BYTES, REPORTED_BYTES}, "those that ended last are told in full"


def test_what_workers_say_of_their_starts_does_not_silence_a_node() -> None:
    said = {"proof": "p" * limits.MAX_PROOF, "spans": (Span("setup", 0.0, 1.0),) * 20, "fingerprint": "same"}
    ready = instances(InstanceState.READY, 400, **said)
    told = report.fitted(status(1, models=MODELS, instances=ready))
    assert limits.MAX_REPORT - 4096 < len(pack(told)) <= limits.MAX_REPORT
    assert living(told) == [each.instance for each in ready]
    assert {each.fingerprint for each in told.instances} == {"same"}
    assert not told.instances[0].proof
    assert told.instances[-1] == ready[-1], "that of the last ones nobody has heard yet"


def test_what_has_ended_leaves_a_report_before_what_lives() -> None:
    """The first that ended first: of them the controller has heard."""
    ended, ready = instances(InstanceState.STOPPED, 5_000), instances(InstanceState.READY, 500)
    told = report.fitted(status(1, models=MODELS, instances=(*ended, *ready)))
    assert limits.MAX_REPORT - 1024 < len(pack(told)) <= limits.MAX_REPORT
    assert living(told) == [each.instance for each in ready]
    kept = len(told.instances) - len(ready)
    assert 0 < kept < 5_000
    assert told.instances[:kept] == ended[-kept:]
    assert told.models == MODELS


def test_models_and_instances_have_half_of_a_report_each() -> None:
    models = tuple(f"sha256:{number:064x}" for number in range(9_000))
    failed = instances(InstanceState.FAILED, 280, error=LONG)
    told = report.fitted(status(1, models=models, instances=failed))
    assert limits.MAX_REPORT - 1024 < len(pack(told)) <= limits.MAX_REPORT
    shares = len(pack(told.models)), len(pack(told.instances))
    assert min(shares) > limits.MAX_REPORT // 2 - 4096
    few = report.fitted(status(1, models=models, instances=failed[:50]))
    assert few.instances == failed[:50], "who needs less than half is not cut"


async def test_a_report_whose_instances_are_cut_is_sent_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    sent = list[NodeStatus]()

    async def publish(status: NodeStatus) -> None:
        assert len(pack(status)) <= limits.MAX_MESSAGE
        sent.append(status)

    failed = instances(InstanceState.FAILED, 500, error=LONG)
    made = report.Reporter(lambda sequence: status(sequence, instances=failed), publish)
    await made.send()
    await made.send()
    assert [len(each.instances) for each in sent] == [500, 500]
    assert caplog.text.count("no room for all that 500 instances have to say") == 1
