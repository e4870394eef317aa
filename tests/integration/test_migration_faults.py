"""Whoever dies or falls silent while running calls move: not a token lost, repeated or different. At each step of a
move, each with real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import pytest

from sllm_runtime.protocol.http import InstanceView
from sllm_runtime.protocol.limits import LOST_AFTER_S
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import wait, workers
from tests.fixtures.kept import begin, first_events, read_on
from tests.fixtures.moving import AT, asked, deploy_gated, instances, moved, other, read_while, ready, settled, whole
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import GIVE_UP_S

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
STEPS = ("asked", "starting", "moving", "moved")
"""``migrate`` is on its way; there is a destination; the source takes no new call; the call has gone over."""
PROCESSES = {"nats", "controller", "gateway-g1", "gateway-g2", "invoker-n1", "invoker-n2", "loaderd-n1", "loaderd-n2"}
Fault: TypeAlias = Callable[[Cluster, InstanceView], AbstractContextManager[None]]
"""Befalls the move of an instance. Who falls silent in it is heard again at its end."""


@pytest.fixture(scope="module")
def cluster(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("platform"), nodes=2, gateways=2) as running:
        deploy_gated(running, coder)
        yield running


@pytest.fixture(scope="module")
def text(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The pieces that a call gives where it stays."""
    return whole(cluster, tmp_path_factory.mktemp("open") / "gate")


# --- faults -----------------------------------------------------------------------------------------
def source(_: Cluster, instance: InstanceView) -> list[int]:
    return list(workers(instance.instance))


def destination(cluster: Cluster, instance: InstanceView) -> list[int]:
    """Its worker, as soon as it is there, starting or ready."""
    found: list[int] = []

    def there() -> bool:
        names = [each.instance for each in instances(cluster) if each.node != instance.node]
        found[:] = [pid for name in names for pid in workers(name)]
        return bool(found)

    wait(there, "a destination")
    return found


def daemon(of: Callable[[InstanceView], str]) -> Callable[[Cluster, InstanceView], list[int]]:
    return lambda cluster, instance: [cluster.pid(of(instance))]


VICTIMS: dict[str, Callable[[Cluster, InstanceView], list[int]]] = {
    "source": source,
    "destination": destination,
    "controller": daemon(lambda _: "controller"),
    "nats": daemon(lambda _: "nats"),
    "source-node": daemon(lambda instance: f"invoker-{instance.node}"),
    "destination-node": daemon(lambda instance: f"invoker-{other(instance.node)}"),
}


@contextmanager
def dies(victim: str, cluster: Cluster, instance: InstanceView) -> Iterator[None]:
    for pid in VICTIMS[victim](cluster, instance):
        with suppress(ProcessLookupError):  # a source that all calls have left ends
            os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def is_silent(victim: str, cluster: Cluster, instance: InstanceView) -> Iterator[None]:
    """Until the call has ended."""
    with ExitStack() as stack:
        for pid in VICTIMS[victim](cluster, instance):
            with suppress(ProcessLookupError, FileNotFoundError):  # as above
                stack.enter_context(suspended(pid))
        yield


@contextmanager
def was_silent(victim: str, cluster: Cluster, instance: InstanceView) -> Iterator[None]:
    """For longer than anybody may be who counts as alive; no call ends meanwhile."""
    with is_silent(victim, cluster, instance):
        time.sleep(LOST_AFTER_S + 2.0)  # the fault is that long
    yield


FAULTS: dict[str, Fault] = {
    **{f"{victim}-dies": partial(dies, victim) for victim in VICTIMS},
    **{f"{victim}-silent": partial(is_silent, victim) for victim in VICTIMS if victim != "nats"},
    "nats-silent": partial(was_silent, "nats"),
}


# --- tests ------------------------------------------------------------------------------------------
class Moving:
    """A move that is asked for at the gateway of ``url`` until it goes on, and how far it is."""

    def __init__(self, cluster: Cluster, instance: InstanceView, url: str) -> None:
        self._cluster, self._instance, self._url = cluster, instance, url
        self._before = moved(cluster, url)
        self._threads = [asked(cluster, instance, url)]

    def until(self, step: str) -> None:
        wait(lambda: self._is(step), lambda: f"the move is {step}; there are {instances(self._cluster)}")

    def _is(self, step: str) -> bool:
        if not self._threads[-1].is_alive():  # refused, or given up: that node is back and not heard yet
            self._threads.append(asked(self._cluster, self._instance, self._url))
        if step == "moved":
            return moved(self._cluster, self._url) > self._before
        if step == "moving":
            return self._instance.instance not in [each.instance for each in ready(self._cluster)]
        return step == "asked" or len(instances(self._cluster)) > 1

    def join(self) -> None:
        for thread in self._threads:
            thread.join(GIVE_UP_S)


def whole_again(cluster: Cluster) -> InstanceView:
    """The function's only instance, when what the case before has killed is back."""
    wait(lambda: cluster.running().pids.keys() >= PROCESSES, lambda: f"all are back: {cluster.running().pids}")
    wait(lambda: cluster.http.get("/readyz").status_code == 200, "the platform is ready")
    return settled(cluster)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("fault", FAULTS)
def test_whoever_fails_the_answer_is_the_same(
    cluster: Cluster, text: list[str], tmp_path: Path, fault: str, step: str
) -> None:
    instance, moves = whole_again(cluster), list[Moving]()
    with ExitStack() as stack:

        def act() -> None:
            moves.append(Moving(cluster, instance, cluster.url))
            moves[0].until(step)
            stack.enter_context(FAULTS[fault](cluster, instance))

        assert read_while(cluster, tmp_path / "gate", act) == text
    moves[0].join()


@pytest.mark.parametrize("step", STEPS)
def test_a_gateway_dies_and_the_calls_of_others_move(
    cluster: Cluster, text: list[str], tmp_path: Path, step: str
) -> None:
    """What was kept of its own goes on, wherever its instance is by then."""
    instance, gate = whole_again(cluster), tmp_path / "gate"
    arguments, there = {"gate": str(gate), "at": AT}, cluster.document["urls"][1]
    call, killed, moves = begin(cluster, "coder", arguments), list[int](), list[Moving]()
    first_events(cluster, call, AT)

    def act() -> None:
        moves.append(Moving(cluster, instance, there))
        moves[0].until(step)
        killed.append(cluster.kill("gateway"))

    assert read_while(cluster, gate, act, url=there) == text
    assert read_on(cluster, call, -1) == text
    cluster.wait_restarted("gateway", killed[0])
    moves[0].join()
