"""What counts as one more failure. Pure."""

from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import backoff
from sllm_runtime.control.popularity import WORKED_S, starts
from sllm_runtime.control.view import Failure
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest

CHAT = ("chat", 1)


def failed(previous: Failure | None, now: float, began: float, *, blocking: bool = True) -> Failure:
    return backoff.after(previous, ERROR, now, blocking=blocking, began=began)


@pytest.mark.parametrize("blocking", [True, False])
def test_what_fails_together_failed_once(blocking: bool) -> None:
    first = failed(None, 10.0, 9.0, blocking=blocking)
    assert (first.attempts, first.until) == (1, 11.0)
    assert failed(first, 10.5, 9.0, blocking=blocking) is first, "it began before that was known"
    second = failed(first, 12.0, 11.0, blocking=blocking)
    assert (second.attempts, second.until) == (2, 14.0)
    assert failed(second, 12.5, 11.5, blocking=blocking) is second


def test_a_crash_ends_no_back_off_of_a_start_that_failed() -> None:
    """Else callers would have it started again at once. Crashes after that are counted by themselves."""
    start = failed(None, 10.0, 9.0)
    assert failed(start, 10.5, 10.2, blocking=False) is start
    crash = failed(start, 11.0, 10.5, blocking=False)
    assert (crash.blocking, crash.attempts, crash.until) == (False, 1, 12.0)


def test_eight_starts_for_eight_callers_are_one_attempt() -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", cpu=1.0, max_instances=8, concurrency=1))
    world.wait_for(CHAT, 8)
    world.plan()
    world.hear_all()
    names = world.live(CHAT)
    assert len(names) == 8
    for name in names:
        world.now += 0.01
        world.finish(name, InstanceState.FAILED, ERROR)
    failure = world.view.failures[CHAT]
    assert failure.attempts == 1
    assert failure.until <= world.now + backoff.FIRST_S


def test_an_instance_that_works_counts_by_the_time_however_often_it_is_counted() -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=0))
    world.hear_all()
    view = deployed(world.view, manifest("chat"))
    world.view = replace(view, versions={CHAT: msgspec.structs.replace(view.versions[CHAT], model="sha256:m")})
    world.wait_for(CHAT, 1)
    world.plan()
    (name,) = world.live(CHAT)
    world.hear_all()
    world.finish(name, InstanceState.READY)
    started = dict(world.view.learned.starts)
    counted = [sum(starts(world.view, started, world.now, WORKED_S / 60).values()) for _ in range(60)]
    assert sum(counted) == pytest.approx(1.0)
