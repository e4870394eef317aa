"""Whoever dies or falls silent while a running call moves: not a token lost, repeated or different. In each step of a
move, which is held there, each with real processes. The table in docs/migration.md has a row for each of these."""

from __future__ import annotations

import http.client
import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import pytest

from sllm_gateway.move import Stage
from sllm_runtime.protocol.limits import LOST_AFTER_S
from tests.fixtures.deployed import events, wait, workers
from tests.fixtures.held import STEPS, Flow, Met, flowing
from tests.fixtures.leading import term
from tests.fixtures.moving import other
from tests.fixtures.suspended import suspend, suspended
from tests.fixtures.waiting import GIVE_UP_S

pytestmark = pytest.mark.chaos


def destination(_: Flow, met: Met) -> int:
    (pid,) = workers(met.destination)
    return pid


VICTIMS: Final[dict[str, Callable[[Flow, Met], int]]] = {
    "source-worker": lambda _, met: met.worker,
    "source-invoker": lambda flow, met: flow.cluster.pid(f"invoker-{met.source.node}"),
    "destination-worker": destination,
    "destination-invoker": lambda flow, met: flow.cluster.pid(f"invoker-{other(met.source.node)}"),
    "controller": lambda flow, _: flow.cluster.pid(term(flow.cluster).controller),
    "gateway": lambda _, met: met.gateway,
    "nats": lambda flow, _: flow.cluster.pid("nats"),
}
"""Of the controllers the one that leads."""
USUAL: Final = {
    ("preparing", "destination-invoker"),
    ("preparing", "controller"),
    ("opened", "destination-worker"),
    ("follows", "source-worker"),
    ("beside", "gateway"),
    ("handed", "source-invoker"),
    ("over", "nats"),
}
"""In these each step and each victim is met. The others take minutes (``slow``)."""
ALL: Final = [(step, victim) for step in STEPS for victim in VICTIMS]
DIES: Final = [
    pytest.param(*case, id="-".join(case), marks=() if case in USUAL else (pytest.mark.slow,)) for case in ALL
]
AMONG: Final = [
    pytest.param(*case, id="-".join(case), marks=() if case == ("handed", "source-worker") else (pytest.mark.slow,))
    for case in ALL
]
SILENT: Final = [pytest.param(*case, id="-".join(case), marks=(pytest.mark.slow,)) for case in ALL]
ENDS: Final = {
    how: [pytest.param(step, marks=() if step == usual else (pytest.mark.slow,)) for step in STEPS]
    for how, usual in (("ends", "handed"), ("cancelled", "beside"), ("left", "follows"))
}
STAYS, GOES_OVER, RESUMED, RESUMED_THERE = (0, 0), (1, 0), (0, 1), (1, 1)
"""How often the call went over while its instance lived, and after a death: what the table says of it."""
WAYS: Final = (
    ("preparing opened follows", "source-worker", {RESUMED}),
    ("preparing opened follows", "source-invoker", {RESUMED, GOES_OVER}),
    ("beside handed", "source-worker source-invoker", {RESUMED, GOES_OVER}),
    ("over", "source-worker source-invoker", {GOES_OVER}),
    ("opened follows", "destination-worker destination-invoker", {STAYS}),
    ("beside handed", "destination-worker destination-invoker", {STAYS, RESUMED_THERE}),
    ("over", "destination-worker destination-invoker", {RESUMED_THERE}),
    ("opened follows beside handed over", "controller", {GOES_OVER}),
    ("preparing", "destination-worker destination-invoker controller nats", {STAYS, GOES_OVER}),
    ("opened follows beside handed", "nats", {STAYS, GOES_OVER}),
    ("over", "nats", {GOES_OVER}),
)
"""Several where it is a matter of what is heard first. A call whose gateway dies goes its way elsewhere."""
MIGRATIONS: Final = (
    ("preparing", "source-worker", "abandoned"),
    ("preparing opened follows", "destination-worker destination-invoker", "abandoned"),
    ("beside handed", "destination-worker", "abandoned"),
    ("opened follows beside handed over", "controller", "done"),
)
"""What becomes of the instance's move, where the table says it; what its call went over in is abandoned no more."""


@pytest.fixture(scope="module")
def flow(coder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flow]:
    with flowing(tmp_path_factory.mktemp("platform"), coder) as found:
        yield found


def early(step: str, victim: str) -> bool:
    """Whether the victim is hit before what is said in this step: a source that is told that the call is over ends."""
    return (step, victim) == (Stage.OVER, "source-worker")


def kill(pid: int) -> None:
    """SIGKILL to a process that is there, and wait until it is not."""
    with open(os.pidfd_open(pid), "rb", buffering=0) as handle:
        signal.pidfd_send_signal(handle.fileno(), signal.SIGKILL)
        assert select.select([handle], [], [], GIVE_UP_S)[0], f"{pid} does not die"


T = TypeVar("T")


def of(table: Iterable[tuple[str, str, T]], step: str, victim: str) -> T | None:
    """What it says of them, if anything."""
    return next((found for steps, who, found in table if step in steps.split() and victim in who.split()), None)


@pytest.mark.parametrize(("step", "victim"), DIES)
def test_dies(flow: Flow, step: str, victim: str, record_property: Callable[[str, object], None]) -> None:
    """How long its caller waits is no matter of right or wrong here: ``-o junit_family=xunit1 --junitxml FILE`` tells
    that for docs/migration.md."""
    with flow.move(step, first=early(step, victim)) as met:
        kill(VICTIMS[victim](flow, met))
        assert flow.rest(met) == met.right
    record_property("longest_gap_s", f"{met.longest_gap_s:.3f}")
    assert met.stream.broken is (victim == "gateway")
    ways, migration = of(WAYS, step, victim), of(MIGRATIONS, step, victim)
    way = flow.way(met)
    assert ways is None or way in ways
    if (step, victim) == (Stage.FOLLOWS, "source-worker"):  # it had the call and nothing that the gateway waited for
        at_once = f"its instance died on its way to {met.destination}"
        wait(lambda: at_once in told(flow, "call.resumed", call=met.stream.call), "it went on where it was opened")
    if migration and not (migration == "abandoned" and way == RESUMED_THERE):
        kind = f"migration.{migration}"
        wait(lambda: told(flow, kind, instance=met.source.instance), f"{kind} of {met.source.instance}")


@pytest.mark.parametrize(("step", "victim"), AMONG)
def test_dies_among_several(flow: Flow, step: str, victim: str) -> None:
    """Three calls of one instance go their way together, two of one gateway and one of the other."""
    with flow.move(step, first=early(step, victim), beside=2) as met:
        kill(VICTIMS[victim](flow, met))
        assert flow.rest(met) == met.right
        assert all(other.whole() for other in met.others)


def told(flow: Flow, kind: str, **of_whom: str) -> list[str]:
    """What events of this kind say."""
    found = events(flow.cluster, "coder", kind)
    return [event["message"] for event in found if of_whom.items() <= event.items()]


@pytest.mark.parametrize(("step", "victim"), SILENT)
def test_is_silent(flow: Flow, step: str, victim: str) -> None:
    """Until the call has ended; NATS, without which nothing goes on, for longer than whoever counts as alive may be."""
    with flow.move(step, first=early(step, victim)) as met, ExitStack() as stack:
        pid = VICTIMS[victim](flow, met)
        stack.enter_context(suspended(pid))
        if victim == "gateway":
            flow.read_on(met)
            assert met.seen == met.right
            return
        met.hold.close()
        suspend(pid)  # it may be the one that held the move
        if victim == "nats":
            time.sleep(LOST_AFTER_S + 2.0)  # the fault is that long
            stack.close()
        assert flow.rest(met) == met.right
    if victim == "nats":
        return
    moved, resumed = flow.way(met)  # a node that is silent may be asked again before it counts as dead
    late = {GOES_OVER} if "source" in victim else set()
    assert (moved, min(resumed, 1)) in (of(WAYS, step, victim) or set()) | late


# --- calls that come to their end -------------------------------------------------------------------
@pytest.mark.parametrize("step", ENDS["ends"])
def test_ends(flow: Flow, step: str) -> None:
    """By itself, at the source, before that is told anything of this step."""
    with flow.move(step, first=True) as met:
        flow.until_ended(met.source.instance)
        assert flow.rest(met) == met.right
    nothing_is_left(flow)


@pytest.mark.parametrize("step", ENDS["cancelled"])
def test_cancelled(flow: Flow, step: str) -> None:
    """Neither source nor destination goes on with it, and the next call is answered as ever."""
    with flow.move(step) as met:
        flow.slowly()
        answer = said_while_held(flow, met)
        assert answer.status == 202
        seen = met.seen + list(met.stream.values())
        assert met.stream.error is not None
        assert met.stream.error["code"] == "cancelled"
        assert seen == met.right[: len(seen)]
        assert len(seen) < len(met.right)
    nothing_is_left(flow)
    assert not flow.ended()


@pytest.mark.parametrize("step", ENDS["left"])
def test_left(flow: Flow, step: str) -> None:
    """By its caller."""
    with flow.move(step) as met:
        flow.slowly()
        met.stream.close()
        met.hold.close()
    nothing_is_left(flow)
    assert not flow.ended()


def said_while_held(flow: Flow, met: Met) -> http.client.HTTPResponse:
    """Its cancel lies there when the gateway goes on."""
    place = urlsplit(flow.cluster.url).netloc
    with closing(http.client.HTTPConnection(place, timeout=GIVE_UP_S)) as connection:
        connection.request("POST", f"/v1/calls/{met.stream.call}/cancel", headers=flow.cluster.headers)
        met.hold.close()
        return connection.getresponse()


def nothing_is_left(flow: Flow) -> None:
    """No call at the gateway, one instance, and that answers as ever."""
    wait(lambda: "sllm_calls_open 0.0" in flow.cluster.http.get("/metrics").text, "no call is open")
    flow.settled()
