"""What a node remembers of its instances, and by what they are judged; what each does has other tests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from sllm_invoker import instances as invoker_instances
from sllm_invoker.admission import Ledger
from sllm_invoker.instance import STOP_S, Instance
from sllm_invoker.instances import KEEP_FINAL_S, Instances
from sllm_runtime.protocol import limits
from sllm_runtime.protocol.states import InstanceState
from sllm_runtime.protocol.worker import Ready, Stop
from tests.fixtures.invoker import order
from tests.fixtures.nats import NODE
from tests.fixtures.waiting import until


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def instances_at(clock: Clock) -> Instances:
    nobody: Any = lambda *_: None  # noqa: E731
    suppliers: Any = SimpleNamespace(proofs=SimpleNamespace(keep=nobody), pool=SimpleNamespace(last_error=None))
    return Instances(
        NODE, Ledger(cpu=100.0, memory=2**50), suppliers, nobody, ready=nobody, consumed=nobody, moved=nobody,
        changed=nobody, counted=nobody, clock=clock, wall=clock,
    )  # fmt: skip


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each instance ends as soon as it has begun."""

    async def run(instance: Instance) -> None:
        instance._state, instance.ended_at = InstanceState.STOPPED, instance._around.clock()

    monkeypatch.setattr(Instance, "run", run)


@pytest.mark.usefixtures("ending")
async def test_one_that_has_ended_is_told_for_a_while_and_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invoker_instances, "REMEMBERED", 2)
    clock = Clock()
    node, orders = instances_at(clock), [order() for _ in range(3)]
    for each in orders:
        assert node.start(each) == "begun"
    await until(lambda: not node._living, what="all have ended")
    clock.now += KEEP_FINAL_S
    node.tick()
    assert len(node.statuses()) == 3
    clock.now += 0.1
    node.tick()
    assert node.statuses() == ()
    assert [node.start(each) for each in orders] == ["begun", "it has ended: STOPPED", "it has ended: STOPPED"]
    await node.close()


async def test_a_worker_is_not_judged_by_what_this_process_has_not_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still itself: it is silent once it has had its time again."""
    monkeypatch.setattr(Instance, "run", lambda _: asyncio.Event().wait())
    clock, asked = Clock(), order()
    node = instances_at(clock)
    node.start(asked)
    instance = node._instances[asked.instance]
    instance._state, instance.work = (
        InstanceState.READY,
        cast(Any, SimpleNamespace(deaf=lambda _: None, forgive=lambda _: None)),
    )
    instance._sandboxes[0] = cast(Any, SimpleNamespace(short_of_memory=lambda: False))
    instance._hear()
    clock.now += 10 * limits.LOST_AFTER_S
    node.tick()
    assert not instance._verdict.done()
    while not instance._verdict.done():
        assert clock.now < 12 * limits.LOST_AFTER_S
        clock.now += 0.5
        node.tick()
    assert clock.now > 11 * limits.LOST_AFTER_S
    assert instance._verdict.result().state is InstanceState.LOST
    await node.close()


async def at_work(node: Instances, monkeypatch: pytest.MonkeyPatch, **work: Any) -> Instance:
    """A ready instance that does nothing by itself."""
    monkeypatch.setattr(Instance, "run", lambda _: asyncio.Event().wait())
    asked = order()
    node.start(asked)
    instance = node._instances[asked.instance]
    nothing: Any = lambda *_: None  # noqa: E731
    given = {"deaf": nothing, "forgive": nothing, "close": nothing, "tell": nothing, **work}
    instance._state, instance.work = InstanceState.READY, cast(Any, SimpleNamespace(**given))
    instance._sandboxes[0] = cast(Any, SimpleNamespace(short_of_memory=lambda: False))
    instance._hear()
    return instance


async def test_one_that_drains_is_judged_as_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grace may be an hour."""
    clock = Clock()
    node = instances_at(clock)
    instance = await at_work(node, monkeypatch)
    node.stop(instance.order.instance, "a test", 3600.0)
    assert instance.state is InstanceState.DRAINING
    while clock.now < 2 * limits.LOST_AFTER_S:
        clock.now += 0.5
        node.tick()
    assert instance._verdict.done()
    assert instance._verdict.result().state is InstanceState.LOST
    await node.close()


@pytest.mark.parametrize(("resume", "told"), [(False, 5.0), (True, 5.0 + STOP_S)])
async def test_a_worker_cancels_no_call_that_is_to_go_on_elsewhere(
    monkeypatch: pytest.MonkeyPatch, resume: bool, told: float
) -> None:
    """Its own grace would end as the instance's does, and who is first would be chance."""
    said = list[Stop]()
    node = instances_at(Clock())
    instance = await at_work(node, monkeypatch, tell=said.append)
    node.stop(instance.order.instance, "a test", 5.0, resume=resume)
    assert said == [Stop(grace_s=told)]
    await node.close()


async def test_what_is_ready_is_not_late_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instance, "run", lambda _: asyncio.Event().wait())
    clock = Clock()
    node = instances_at(clock)
    node.start(order())
    (instance,) = node._instances.values()
    work: Any = SimpleNamespace(open=lambda **_: None)
    instance._timer = asyncio.get_running_loop().call_later(0.0, instance._start_timed_out)
    instance._on_ready(Ready(), work)
    for _ in range(10):
        await asyncio.sleep(0)
        assert not instance._verdict.done()
    assert instance.state is InstanceState.READY
    await node.close()
