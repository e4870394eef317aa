"""What counts as one more failure. Pure."""

from dataclasses import replace

import msgspec
import pytest

from sllm_runtime.control import backoff
from sllm_runtime.control.popularity import WORKED_S, starts
from sllm_runtime.control.view import Failure
from sllm_runtime.protocol.errors import ErrorBody, InstanceLost
from sllm_runtime.protocol.states import InstanceState
from tests.unit.control.world import ERROR, FakeNode, World, deployed, manifest

CHAT = ("chat", 1)


TAKEN = InstanceLost("the node's loaderd went away").body()


def failed(
    previous: Failure | None, now: float, began: float, *, started: bool = False, error: ErrorBody = ERROR
) -> Failure:
    return backoff.after(previous, error, now, started=started, began=began)


@pytest.mark.parametrize("started", [False, True])
def test_what_fails_together_failed_once(started: bool) -> None:
    first = failed(None, 10.0, 9.0, started=started)
    assert (first.attempts, first.until, first.blocking) == (1, 11.0, not started)
    assert failed(first, 10.5, 9.0, started=started) is first, "it began before that was known"
    second = failed(first, 12.0, 11.0, started=started)
    assert (second.attempts, second.until) == (2, 14.0)
    assert failed(second, 12.5, 11.5, started=started) is second


def test_starts_that_went_with_their_node_count_when_each_does() -> None:
    """It may be they that end its loaderd: who waits is told at last, and another node is tried."""
    failure = None
    for count in range(1, backoff.MOST_TAKEN):
        failure = failed(failure, 10.0 * count, 10.0 * count - 1, error=TAKEN)
        assert (failure.taken, failure.blocking) == (count, False)
        assert failed(failure, 10.0 * count + 1, 10.0 * count - 1, error=TAKEN) is failure, "one event, two starts"
    last = failed(failure, 40.0, 39.0, error=TAKEN)
    assert (last.blocking, last.attempts, last.until) == (True, backoff.MOST_TAKEN, 48.0)
    assert failed(last, 60.0, 50.0, error=TAKEN).until == 76.0, "it doubles"
    assert backoff.got_ready(last) is None


def test_one_that_gets_ready_ends_the_row() -> None:
    """Its crash is still counted: that holds back what nobody asked for."""
    taken = failed(None, 10.0, 9.0, error=TAKEN)
    assert backoff.got_ready(taken) is None
    crash = failed(taken, 12.0, 11.0, started=True)
    assert (crash.taken, crash.attempts) == (1, 2)
    left = backoff.got_ready(crash)
    assert left == replace(crash, taken=0, attempts=1)
    assert backoff.got_ready(left) is left


def test_a_crash_ends_no_back_off_of_a_start_that_failed() -> None:
    """Else callers would have it started again at once. Crashes after that are counted by themselves."""
    start = failed(None, 10.0, 9.0)
    assert failed(start, 10.5, 10.2, started=True) is start
    crash = failed(start, 11.0, 10.5, started=True)
    assert (crash.blocking, crash.attempts, crash.until) == (False, 1, 12.0)


@pytest.mark.parametrize(("ran_s", "attempts"), [(59.9, 3), (60.0, 1)])
def test_what_had_run_for_a_minute_counts_from_the_beginning_again(ran_s: float, attempts: int) -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat", min_instances=1))
    for seconds in (1.0, 1.0, ran_s):
        world.turn(10.0)
        (name,) = world.live(CHAT)
        world.finish(name, InstanceState.READY)
        world.now += seconds
        world.reset_listening()
        world.finish(name, InstanceState.LOST, InstanceLost("killed").body())
    assert world.view.failures[CHAT].attempts == attempts


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


def test_a_start_that_ends_its_loaderd_each_time_is_made_elsewhere_and_told_of() -> None:
    """Not for ever on the same node, which would be given up with its supervisor, with nobody the wiser."""
    world = World(FakeNode("n1", cpu=8.0, gpus=0), FakeNode("n2", cpu=8.0, gpus=0))
    world.hear_all()
    world.view = deployed(world.view, manifest("chat"))
    world.wait_for(CHAT, 1)
    nodes = []
    for _ in range(backoff.MOST_TAKEN):
        world.plan()
        (name,) = world.live(CHAT)
        nodes.append(world.view.instances[name].record.node)
        world.hear_all()
        world.now += 1.0
        assert not backoff.active(world.view.failures.get(CHAT), world.now, asked=True), "made again at once"
        world.finish(name, InstanceState.FAILED, TAKEN)
    assert backoff.active(world.view.failures[CHAT], world.now, asked=True)
    assert "loaderd" in backoff.for_caller(world.view.failures[CHAT], world.now).message
    world.turn(world.view.failures[CHAT].until - world.now + 0.1)
    (name,) = world.live(CHAT)
    assert world.view.instances[name].record.node != nodes[-1]


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


def test_an_instance_that_is_idle_counts_for_nothing() -> None:
    world = World(FakeNode("n1", cpu=8.0, gpus=0))
    world.hear_all()
    view = deployed(world.view, manifest("chat", keep_alive=600))
    world.view = replace(view, versions={CHAT: msgspec.structs.replace(view.versions[CHAT], model="sha256:m")})
    world.wait_for(CHAT, 1)
    world.plan()
    (name,) = world.live(CHAT)
    world.hear_all()
    world.finish(name, InstanceState.READY)
    world.wait_for(CHAT, 0)
    before = dict(world.view.learned.starts)
    world.turn(WORKED_S + 1.0)
    assert world.live(CHAT) == [name]
    assert starts(world.view, before, world.now, WORKED_S) == {}


def test_what_fails_for_ever_is_left_alone_for_a_minute_at_most() -> None:
    failure: Failure | None = None
    now, waits = 10.0, list[float]()
    for _ in range(9):
        failure = failed(failure, now, now)
        waits.append(failure.until - now)
        now = failure.until
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert backoff.delay(10_000) == 60.0


@pytest.mark.parametrize(
    ("code", "status", "told"), [("node_not_found", 404, "start_failed"), ("out_of_memory", 503, "out_of_memory")]
)
def test_callers_are_told_to_come_again_whatever_it_failed_of(code: str, status: int, told: str) -> None:
    error = msgspec.structs.replace(ERROR, code=code, status=status)
    found = backoff.for_caller(Failure(error=error, attempts=1, at=10.0, until=11.0, blocking=True), 10.25)
    assert (found.code, found.status, found.retry_after_s) == (told, 503, 0.75)
