"""Three NATS servers of which one is gone and one stands still: the third leads streams, and can store nothing."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nats_cluster import NAMES, NatsCluster
from sllm.sse import Parser
from sllm_gateway.follow import messages
from sllm_gateway.journal import Journal
from sllm_gateway.stored import Stored
from sllm_runtime.control.lease import SURE_S
from sllm_runtime.platform.bus import Bus
from sllm_runtime.platform.connection import ELECTION_S
from sllm_runtime.platform.settings import Settings
from sllm_runtime.platform.streams import STATE_STREAM, ensure_streams
from sllm_runtime.protocol.calls import Began, CallOrder, Entry
from sllm_runtime.protocol.subjects import CALLS_STREAM, JOURNAL_STREAM, call_entries
from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, wait, wait_cold
from tests.fixtures.kept import begin, first_events
from tests.fixtures.suspended import suspended
from tests.fixtures.waiting import until

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
LEADER, KILLED, STOPPED = NAMES
FENCED = 4
"""Tries of one write: the first is not answered, those after it are refused while that one is on its way."""


@contextlib.contextmanager
def without_majority(nats: NatsCluster) -> Iterator[None]:
    """Inside; LEADER alone runs."""
    nats.kill(KILLED)
    try:
        with suspended(nats.pids()[STOPPED]):
            yield
    finally:
        nats.start(KILLED)


@contextlib.asynccontextmanager
async def connected(nats: NatsCluster) -> AsyncIterator[Bus]:
    """To LEADER, which leads the journals."""
    bus = await Bus.connect(Settings.load({"SLLM_NATS_URL": nats.urls[LEADER]}), "up", name="test")
    try:
        await ensure_streams(bus, len(NAMES))
        for stream in (CALLS_STREAM, JOURNAL_STREAM):
            await asyncio.to_thread(nats.lead, stream, LEADER)
        yield bus
    finally:
        await bus.close()


async def test_a_write_that_is_refused_for_the_try_before_it_is_made_again(tmp_path: Path) -> None:
    call, tries = "call-1", 0
    order = CallOrder(
        call=call, function="f", version=1, kind="fn", seed=1, parts=0, gateway="g1", durable=True, created=0.0
    )

    async def pause(seconds: float) -> None:
        nonlocal tries
        tries += 1
        await asyncio.sleep(seconds)

    with NatsCluster(tmp_path) as nats:
        async with connected(nats) as bus:
            journal = Journal(bus, Stored(bus, pause=pause))
            fence = await journal.write(CALLS_STREAM, call, order, 60.0)
            began = Began(at=0.0, numerics="", epoch=1)
            with without_majority(nats):
                writing = asyncio.create_task(journal.write(CALLS_STREAM, call, began, 60.0, fence))
                await until(lambda: tries >= FENCED or writing.done(), what="it is tried again")
                assert not writing.done(), writing.exception()
            assert await writing > fence
            found: list[Entry] = [order, began]
            assert (await journal.now(CALLS_STREAM, call))[1] == found


async def test_who_reads_waits_for_an_election(tmp_path: Path) -> None:
    """As long as who writes: nothing is said before."""
    with NatsCluster(tmp_path) as nats:
        async with connected(nats) as bus:
            none = messages(bus, CALLS_STREAM, call_entries(CALLS_STREAM, "call-1"), None)
            with without_majority(nats):
                await until(lambda: leaderless(bus), what="the leader knows that it is none")
                reading = asyncio.create_task(anext(none))
                await asyncio.wait({reading}, timeout=ELECTION_S / 2)
                assert not reading.done(), reading.exception()
            assert (await reading).data is None, "all that was there has come"
            await none.aclose()


async def leaderless(bus: Bus) -> bool:
    """Whether JetStream answers nobody."""
    try:
        await bus.jetstream.account_info()
    except Exception:  # in whichever way: that is what is waited for
        return True
    return False


@pytest.mark.parametrize("seconds", [4.0, ELECTION_S + 5.0])
def test_a_kept_call_goes_on_when_there_is_a_majority_again(tmp_path: Path, seconds: float) -> None:
    """For longer than one write is tried, too: it runs, so nobody else would ever write how it ends."""
    with NatsCluster(tmp_path / "nats") as nats:
        env = {**nats.env, "SLLM_NATS_URL": nats.urls[LEADER]}
        with Cluster(tmp_path, env=env) as cluster:
            deploy(cluster, "slow_stream", keep_alive=300, timeout=120)
            nats.lead(CALLS_STREAM, LEADER)
            call = begin(cluster, "slow-stream", {"count": 300, "pause": 0.02})
            first_events(cluster, call, 10)
            with without_majority(nats):
                time.sleep(seconds)  # how long the fault lasts
            path = f"/v1/calls/{call}"
            wait(lambda: cluster.http.get(path).json()["finished"], "the call has ended")
            answer = cluster.http.get(f"{path}/events")
            events = [event for event in Parser().feed(answer.content) if event.comment is None]
            assert events[-1].done, events[-1]
            assert [event.data for event in events[:-1]] == [str(number) for number in range(300)]


def test_who_begins_a_cold_stream_sees_that_the_controller_waits(tmp_path: Path) -> None:
    """And is served once there is a majority again."""
    asked: dict[str, Any] = {"json": {"text": "a"}, "headers": {"accept": "text/event-stream"}}
    with NatsCluster(tmp_path / "nats") as nats:
        env = {**nats.env, "SLLM_NATS_URL": nats.urls[LEADER]}
        with Cluster(tmp_path, env=env) as cluster, contextlib.ExitStack() as fault:
            deploy(cluster, "kinds::awaited", name="cold", keep_alive=0)
            wait_cold(cluster, "cold")
            nats.lead(STATE_STREAM, STOPPED)  # who led it before still answers who reads, which is proof as well
            with suspended(cluster.pid("controller")):
                fault.enter_context(without_majority(nats))
                time.sleep(SURE_S)  # so long the proof holds that it has
            with cluster.http.stream("POST", "/fn/cold", **asked) as response:
                lines = response.iter_lines()
                assert any("cannot know whether it still leads" in line for line in lines)
                fault.close()
                assert 'data: "A"' in lines
