"""Random kills under load. Whatever dies, a stream is right to its last value, or ends in an error that says so."""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.fixtures.cluster import Cluster
from tests.fixtures.deployed import deploy, live, wait, workers
from tests.fixtures.streams import Stream
from tests.fixtures.waiting import GIVE_UP_S

pytestmark = [pytest.mark.chaos, pytest.mark.slow]
STORM_S = 20.0
EVERY_S = 1.5
CLIENTS = 6
COUNT = 60
MAY_END = {"instance_lost", "unavailable", "start_failed", "queue_timeout", "no_capacity", "deadline_exceeded"}
VICTIMS = ("nats", "controller", "loaderd-n1", "loaderd-n2", "invoker-n1", "invoker-n2", "worker", "worker", "worker")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, nodes=2) as running:
        options = {"concurrency": 4, "max_instances": 2, "min_instances": 2}
        deploy(running, "slow_stream", name="paced", **options)
        wait(lambda: len(live(running, "paced")) == 2, "two instances")
        yield running


def call_until(cluster: Cluster, until: float) -> Counter[str]:
    """Stream after stream; how each ended. Fails on a wrong, lost or repeated value and on an end without a reason."""
    ends: Counter[str] = Counter()
    while time.monotonic() < until:
        with Stream(cluster, "paced", {"count": COUNT, "pause": 0.02}) as stream:
            values = list(stream.values())
            assert values == list(range(len(values)))
            assert not stream.broken, "no gateway was killed"
            if stream.done:
                assert len(values) == COUNT
                assert stream.error is None
                ends["done"] += 1
            else:
                assert stream.error is not None, f"the stream ended after {len(values)} values without a word"
                assert stream.error["code"] in MAY_END, stream.error
                ends[stream.error["code"]] += 1
    return ends


def strike(cluster: Cluster, victim: str, rng: random.Random) -> str:
    """Kill one process; one that is just being restarted is spared. Who was hit."""
    pids = sorted(workers("paced")) if victim == "worker" else [cluster.running().pids.get(victim, 0)]
    pid = rng.choice(pids) if pids else 0
    if pid:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return ""
    return victim if pid else ""


@pytest.mark.parametrize("seed", [1, 2])
def test_storm(cluster: Cluster, seed: int) -> None:
    rng = random.Random(seed)
    hit: Counter[str] = Counter()
    until = time.monotonic() + STORM_S
    with ThreadPoolExecutor(CLIENTS) as pool:
        futures = [pool.submit(call_until, cluster, until) for _ in range(CLIENTS)]
        while time.monotonic() < until - 2 * EVERY_S:
            time.sleep(EVERY_S)  # the pace of the storm
            hit[strike(cluster, rng.choice(VICTIMS), rng)] += 1
        ends = sum((future.result(GIVE_UP_S) for future in futures), Counter())
    assert ends["done"] >= CLIENTS, (ends, hit)
    assert sum(hit.values()) - hit[""] >= 6, hit
    assert ends["instance_lost"] > 0, (ends, hit)
    wait(lambda: healthy(cluster), f"the platform is well again after {hit}, {ends}")
    wait(lambda: set(workers("paced").values()) == set(live(cluster, "paced")), "no worker is left over")


def healthy(cluster: Cluster) -> bool:
    try:
        answer = cluster.http.post("/fn/paced", json={"count": 3, "pause": 0})
        return answer.status_code == 200 and answer.json() == [0, 1, 2] and len(live(cluster, "paced")) == 2
    except httpx.HTTPError:
        return False
